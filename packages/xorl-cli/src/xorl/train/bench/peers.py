"""Peers: other trainers to benchmark beside xorl, namely transformers with Liger, FlashAttention 4 or compilation.

A peer implements the engine's interface: it gets the same batches and learning rates as xorl, and uses them the way
its own users would. It initialises its own weights, steps with torch's fused AdamW and clips with torch's function.
If the configuration trains adapters, it trains them with PEFT.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from xorl.config import Config
from xorl.config.local import LoraConfig
from xorl.core.loss import LossFn, LossOutput
from xorl.core.mesh import Mesh
from xorl.core.models import training_flops
from xorl.core.models.flops import matmul_parameters
from xorl.core.optim import Fp32Accumulation
from xorl.core.parallel import ParallelModel
from xorl.core.parallel.ddp import replicate
from xorl.core.parallel.executor import Tensors
from xorl.core.parallel.fsdp import shard
from xorl.core.runtime import default_device_type
from xorl.data import PackedBatch
from xorl.kernels.attention import AttentionFn, AttentionSpec, resolve_attention
from xorl.kernels.layout import SequenceLayout
from xorl.train.adapters.inject import adapter_spec
from xorl.train.architecture import Architecture
from xorl.train.bench.image_peers import ImagePeer, refusal
from xorl.train.build import EngineMaker
from xorl.train.engine import Engine, OnOutput, StepLosses, Update
from xorl.train.export.verify import require_peft
from xorl.train.layer_kernels import attention_requests
from xorl.train.model import DTYPES

if TYPE_CHECKING:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

BASE = "transformers"
# The suffixes of a peer's name. `grouped` leaves experts to the grouped products of transformers, not to Liger.
PARTS = ("liger", "fa4", "compile", "autocast", "grouped")


@dataclass(frozen=True)
class Peer:
    """`transformers` with the parts listed in its name, such as transformers-liger-fa4."""

    name: str
    parts: frozenset[str]

    @classmethod
    def parse(cls, name: str) -> Peer:
        """Parse a name. Raises ValueError if it is unknown."""
        base, *parts = name.split("-")
        if base != BASE or not set(parts) <= set(PARTS) or len(set(parts)) != len(parts):
            known = ", ".join(f"-{part}" for part in PARTS)
            raise ValueError(
                f"--peers {name}: unknown peer; use {BASE}, followed by any of {known}, such as {BASE}-liger-fa4"
            )
        return cls(name, frozenset(parts))

    @property
    def backend(self) -> str | None:
        """The attention backend of xorl that replaces transformers' own, if any."""
        return "flash_attention_4" if "fa4" in self.parts else None

    def unavailable_reason(self, config: Config, architecture: Architecture) -> str | None:
        """Why this peer cannot run the configuration on this machine; None if it can."""
        train = config.train
        if max(train.model_parallel_sizes.values()) > 1:
            return "peers run with data parallelism alone"
        if "liger" in self.parts and find_spec("liger_kernel") is None:
            return "liger_kernel is not installed"
        if config.lora.enable_lora and find_spec("peft") is None:
            return "peft is not installed"
        if "liger" in self.parts and not torch.cuda.is_available():
            return "Liger's kernels need a GPU"
        images = architecture.config.images
        if images is not None and (reason := refusal(images)) is not None:
            return reason
        model_type = str(_values_of(architecture)["model_type"])
        if "liger" in self.parts and model_type not in _liger_functions():
            return f"Liger has no kernels for {model_type}"
        if self.backend is not None:
            try:
                device = torch.device(default_device_type())
                for request in attention_requests(architecture.config, train, device):
                    resolve_attention(self.backend, request)
            except RuntimeError as error:
                return str(error)
        return None

    @contextmanager
    def engine_maker(self) -> Iterator[EngineMaker]:
        """Yields the function that builds its engine. On exit, Liger's patches of transformers' modules are undone."""
        patched: list[AbstractContextManager[None]] = []

        def make(config: Config, architecture: Architecture, mesh: Mesh, device: torch.device) -> Engine:
            hf_config, model_class = _transformers(_values_of(architecture))
            if architecture.config.recurrences and find_spec("fla") is not None:
                patch = _unguarded()
                patch.__enter__()
                patched.append(patch)
            if "liger" in self.parts:
                options = {"swiglu": False} if "grouped" in self.parts else {}
                patch = _liger(
                    str(_values_of(architecture)["model_type"]), sys.modules[model_class.__module__], options
                )
                patch.__enter__()
                patched.append(patch)
            return _engine(self, hf_config, config, architecture, mesh, device)

        try:
            yield make
        finally:
            while patched:
                patched.pop().__exit__(None, None, None)


def peer_settings(config: Config) -> str:
    """The optimizer and precision of every peer, which may differ from those of xorl."""
    train = config.train
    parts = [
        "torch's fused AdamW",
        f"parameters in {train.param_dtype}",
        *(["PEFT's adapters in fp32"] if config.lora.enable_lora else []),
        f"products in {'bf16' if train.enable_mixed_precision else 'fp32'}",
        *(["no fp8"] if train.fp8 != "none" else []),
    ]
    return ", ".join(parts)


def _values_of(architecture: Architecture) -> Mapping[str, object]:
    """The part of config.json that a peer trains: all of it if the model reads images."""
    return architecture.text_values if architecture.config.images is None else architecture.hf_config


def _transformers(values: Mapping[str, object]) -> tuple[PreTrainedConfig, type]:
    """transformers' configuration object for the values of a config.json, and its model class."""
    from transformers import AutoConfig  # noqa: PLC0415  (takes seconds to import; only peers use it)

    rest = {key: value for key, value in values.items() if key != "model_type"}
    hf_config = AutoConfig.for_model(str(values["model_type"]), **rest)
    return hf_config, _class_of(hf_config)


def _auto_class(hf_config: PreTrainedConfig) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: PLC0415

    return AutoModelForImageTextToText if "vision_config" in hf_config.to_dict() else AutoModelForCausalLM


def _class_of(hf_config: PreTrainedConfig) -> type:
    model_class = _auto_class(hf_config)._model_mapping[type(hf_config)]
    assert isinstance(model_class, type), "a configuration class has one causal model"
    return model_class


@contextmanager
def _liger(model_type: str, module: ModuleType, options: dict[str, bool]) -> Iterator[None]:
    """Patches `module`, transformers' code of a model family, with Liger's norms, rotary, MLP and fused loss.

    options: kernels to leave out.
    """
    with _restored(module):
        _liger_functions()[model_type](**options)  # by default, all kernels that Liger has for the family
        yield


def _liger_functions() -> Mapping[str, Callable[..., None]]:
    """The functions that patch a family of transformers with Liger's kernels, by model type."""
    # Optional: users who compare with Liger install it.
    from liger_kernel.transformers.monkey_patch import (  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
        MODEL_TYPE_TO_APPLY_LIGER_FN,
    )

    return MODEL_TYPE_TO_APPLY_LIGER_FN


@contextmanager
def _unguarded() -> Iterator[None]:
    """Lets fla-core run the kernel that it refuses with some releases of Triton, for its speed.

    Its gradients may be wrong there; without it, transformers could not train such a model at all.
    """
    from fla.ops.common import chunk_o  # noqa: PLC0415  # pyright: ignore[reportMissingImports]  (optional)

    with _restored(chunk_o):
        chunk_o.TRITON_ABOVE_3_7_1 = True
        yield


@contextmanager
def _restored(module: ModuleType) -> Iterator[None]:
    """On exit, restores the attributes of `module` and the forward methods of the classes it defines."""
    names = dict(vars(module))
    classes = [value for value in names.values() if isinstance(value, type) and value.__module__ == module.__name__]
    methods = [(each, each.__dict__["forward"]) for each in classes if "forward" in each.__dict__]
    try:
        yield
    finally:
        vars(module).update(names)
        for each, forward in methods:
            each.forward = forward


def _engine(
    peer: Peer,
    hf_config: PreTrainedConfig,
    config: Config,
    architecture: Architecture,
    mesh: Mesh,
    device: torch.device,
) -> PeerEngine:
    train = config.train
    compute_dtype = torch.bfloat16 if train.enable_mixed_precision else torch.float32
    assert train.param_dtype is not None, "resolved by the configuration"
    param_dtype = DTYPES[train.param_dtype]
    model_class = _class_of(hf_config)
    # Not all families have it.
    attention = "sdpa" if model_class._supports_sdpa else "eager"
    if peer.backend is not None:
        request, *_ = attention_requests(architecture.config, train, device)
        attention = register_attention(resolve_attention(peer.backend, request))
    with device:
        model: nn.Module = _auto_class(hf_config).from_config(
            hf_config, dtype=param_dtype, attn_implementation=attention
        )
    images = architecture.config.images
    of_images = None if images is None else ImagePeer(images, train, device)
    if of_images is not None:
        of_images.prepare_(model, has_attention=peer.backend is not None)
    trunk = "model.layers" if images is None else "model.language_model.layers"
    layers = list(model.get_submodule(trunk).children())
    num_frozen, num_added = 0, 0
    if config.lora.enable_lora:
        model, num_added = _with_adapters(model, config.lora, architecture)
        num_frozen = matmul_parameters(architecture.config)
    if train.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable()  # pyright: ignore[reportCallIssue]
    if "compile" in peer.parts:
        for layer in layers:
            layer.compile()
    forward = model
    if train.data_parallel_mode == "fsdp2":
        shard(
            model,
            mesh.fsdp,
            layers,
            param_dtype=compute_dtype,
            reshard_after_forward=bool(train.reshard_after_forward),
            collectives=train.fsdp_collectives,
        )
    elif train.data_parallel_mode == "ddp":
        forward = replicate(model, mesh)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # PEFT keeps adapters in fp32 and multiplies in fp32. Under autocast, as in transformers' Trainer, it uses bf16.
    casts = param_dtype != compute_dtype or "autocast" in peer.parts
    return PeerEngine(
        ParallelModel(model, forward, mesh),
        torch.optim.AdamW(parameters, lr=train.lr, weight_decay=train.weight_decay, fused=True),
        device,
        max_grad_norm=train.max_grad_norm,
        flops=lambda lengths: training_flops(architecture.config, lengths, num_frozen=num_frozen, num_added=num_added),
        of_images=of_images,
        autocast=compute_dtype if casts and train.data_parallel_mode != "fsdp2" else None,
        takes_layout=peer.backend is not None,
    )


def _with_adapters(model: nn.Module, lora: LoraConfig, architecture: Architecture) -> tuple[nn.Module, int]:
    """Add PEFT adapters with the same targets and ranks to `model`; returns it and the number of added parameters.

    Raises ValueError for an option that PEFT does not support.
    """
    peft = require_peft("--peers beside adapters")
    spec = adapter_spec(lora, architecture.spec, architecture.config)
    assert spec is not None
    if lora.merge_lora_interval or lora.modules_to_save:
        raise ValueError("lora.merge_lora_interval / modules_to_save: peers do not support these options; remove them")
    if spec.expert_sharing != "none":
        raise ValueError("lora.moe_shared_lora / moe_hybrid_shared_lora: peers share no adapters; set them to false")
    model.enable_input_require_grads()  # pyright: ignore[reportCallIssue]  # a frozen embedding's output has no gradient
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,
            target_modules=spec.targets if isinstance(spec.targets, str) else list(spec.targets),
            lora_dropout=spec.dropout,
            use_rslora=spec.use_rslora,
            use_dora=spec.use_dora,
            rank_pattern=dict(spec.rank_pattern),
            alpha_pattern=dict(spec.alpha_pattern),
        ),
    )
    return adapted, sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)


def register_attention(attention: AttentionFn) -> str:
    """Register one of xorl's attention functions with transformers; returns its `attn_implementation` name.

    The model must be called with `xorl_layout`, the layout of the packed row.
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415
    from transformers.masking_utils import flash_attention_mask  # noqa: PLC0415

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float,
        xorl_layout: SequenceLayout,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        assert attention_mask is None, "the layout defines the mask"
        q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # [T, H, D]
        spec = AttentionSpec(scaling, sliding_window, softcap)
        return attention(q, k, v, xorl_layout, spec, s_aux).unsqueeze(0), None

    # Must not contain "flash": transformers would treat it as one of its own implementations.
    name = "xorl_packed_attention"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, flash_attention_mask)
    return name


class PeerEngine(Engine):
    """A transformers model behind the engine's interface.

    autocast: the compute dtype, if it differs from the parameters' and FSDP does not cast them. takes_layout: whether
    its attention was registered by `register_attention`. The loss is the mean over this rank's tokens of the step.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        max_grad_norm: float | None,
        flops: Callable[[Sequence[int]], float],
        autocast: torch.dtype | None,
        takes_layout: bool,
        of_images: ImagePeer | None,
    ) -> None:
        image_flops = (lambda _: 0.0) if of_images is None else of_images.flops
        super().__init__(model, optimizer, device, max_grad_norm=max_grad_norm, flops=flops, image_flops=image_flops)
        self._of_images = of_images
        self._autocast = autocast
        self._takes_layout = takes_layout
        self._num_items = 1
        self._accumulation = Fp32Accumulation(())  # none: torch accumulates in the parameters' dtype

    def forward_backward(
        self, batches: Iterable[PackedBatch], loss_fn: LossFn, on_output: OnOutput | None = None
    ) -> StepLosses:
        """Compute the gradient of the mean loss; `loss_fn` is ignored, the model computes its own loss."""
        pending = list(batches)
        self._num_items = max(1, sum(batch.num_trained_tokens for batch in pending))
        losses = super().forward_backward(pending, loss_fn, on_output)
        return replace(losses, loss_sum=losses.loss_sum * self._num_items)

    def optim_step(self, lr: float, divisor: Tensor | float) -> Update:
        """Clip and step; `divisor` is ignored, since the gradient is already a mean."""
        limit = self._max_grad_norm if self._max_grad_norm else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, limit, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.timer.mark("optimizer")
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # pyright: ignore[reportAttributeAccessIssue]
        return Update(whole, torch.zeros((), device=self.device))

    def _call(self, batch: PackedBatch, loss_fn: LossFn, received: Tensors = (), chunk: int = 0) -> LossOutput:
        batch = batch.to(self.device, non_blocking=True)
        labels = batch.labels[None]
        arguments: dict[str, object] = {
            "input_ids": batch.input_ids[None],
            "position_ids": batch.positions[None],
            "labels": labels,
            "shift_labels": labels,  # already shifted
            "num_items_in_batch": self._num_items,
            "use_cache": False,
        }
        if self._takes_layout:
            arguments["xorl_layout"] = SequenceLayout(batch.cu_seqlens, batch.positions, batch.lengths)
        if self._of_images is not None:
            arguments |= self._of_images.arguments(batch)
        autocast = nullcontext() if self._autocast is None else torch.autocast(self.device.type, self._autocast)
        with autocast:
            loss = self.model.forward(**arguments).loss
        return LossOutput(loss, loss.detach(), {})
