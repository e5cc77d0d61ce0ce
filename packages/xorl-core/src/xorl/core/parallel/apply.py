"""parallelize(): applies fp8, recomputation, compilation, offloading and sharding to a model, in the right order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Literal
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from xorl.core.mesh import DataParallelMode, Mesh
from xorl.core.nn.all_gather import AllGather
from xorl.core.nn.fp8 import Fp8Recipe, check_experts, convert_experts, convert_linears, fp8_linears
from xorl.core.nn.moe import Experts
from xorl.core.parallel.activations import Recompute, RecomputeModule, recompute_layers
from xorl.core.parallel.collectives import Collectives
from xorl.core.parallel.compile import CompileBackend, compile_layers, require_compiler
from xorl.core.parallel.ddp import Replicated, replicate, trained_in_replicas
from xorl.core.parallel.fp8 import Fp8Weights
from xorl.core.parallel.fsdp import (
    gather_in_order,
    is_gathered,
    kept_in_fp32,
    no_reshard_after_forward,
    shard,
    sharding_units,
    uses_copy_engines,
)
from xorl.core.parallel.graphed import LayerGraphs, graphs_refusal, kernels_refusal
from xorl.core.parallel.offload import ActivationOffload
from xorl.core.parallel.shares import Shares
from xorl.core.parallel.stored import gather_as_stored
from xorl.core.torch_private import allow_integer_parameters, reset_reducer, reset_units, without_streams
from xorl.kernels.arguments import check_choice, check_floating, check_number, check_type

_FLAGS = ("reshard_after_forward", "forward_prefetch", "cpu_offload", "cuda_graphs")
_FLAGS += ("recompute_experts", "reentrant_recompute")
# A second call would reduce gradients twice, or nest recomputation.
_PARALLELIZED: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True)
class ParallelPolicy:
    """The transformations that `parallelize` applies. The defaults shard the model and change nothing else.

    Attributes:
        data_parallel_mode: how ranks train one model: "fsdp2" shards it, "ddp" replicates it. "none" leaves it as it
            is, for one rank.
        fp8: the fp8 recipe of the linear layers inside the decoder's layers. Experts are in fp8 then, too.
        param_dtype: the dtype in which sharded parameters are gathered (None: their own). Gradients are always reduced
            in fp32.
        reshard_after_forward: free gathered parameters between forward and backward pass (ZeRO-3) instead of keeping
            them (ZeRO-2).
        forward_prefetch: gather each unit's parameters while the previous unit computes.
        collectives: how sharded parameters are gathered and gradients reduced between GPUs; "auto" measures both ways
            at the start.
        unit_modules: class names, or last parts of module paths, of further modules to shard as separate units.
        cpu_offload: keep sharded parameters, gradients and optimizer state in host memory. Parameters are gathered on
            the device to compute.
        recompute: the parts of a layer that the backward pass recomputes.
        recompute_experts: also recompute the gate, up and activation of experts.
        recompute_num_layers: recompute only in this many layers, the first ones; None for all.
        reentrant_recompute: use torch's older implementation of recomputation.
        compile_backend: compile every layer with this backend; None compiles nothing.
        activation_offload_limit: offload activations saved for the backward pass to host memory, except for the last
            ones, up to this many bytes; None offloads nothing.
        cuda_graphs: launch each layer, which is one of a `Decoder`, as two CUDA graphs, one for each pass.
    """

    data_parallel_mode: DataParallelMode = "fsdp2"
    fp8: Fp8Recipe | Literal["none"] = "none"
    param_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True
    forward_prefetch: bool = True
    collectives: Collectives = "auto"
    unit_modules: Sequence[str] = ()
    cpu_offload: bool = False
    recompute: Recompute = "none"
    recompute_experts: bool = False
    recompute_num_layers: int | None = None
    reentrant_recompute: bool = False
    compile_backend: CompileBackend | None = None
    activation_offload_limit: float | None = None
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        for flag in _FLAGS:
            check_type(flag, getattr(self, flag), bool, "False")
        check_choice("data_parallel_mode", self.data_parallel_mode, DataParallelMode)
        check_choice("collectives", self.collectives, Collectives)
        if self.fp8 != "none":
            check_choice("fp8", self.fp8, Fp8Recipe)
        if isinstance(self.recompute, str) or not isinstance(self.recompute, Sequence):
            check_choice("recompute", self.recompute, Literal["none", "operation", "layer"])
        else:
            for module in self.recompute:
                check_choice("recompute", module, RecomputeModule)
        if isinstance(self.unit_modules, str):
            raise ValueError(f"unit_modules: must be a tuple of names, got the string {self.unit_modules!r}")
        if self.param_dtype is not None:
            check_floating("param_dtype", self.param_dtype)
        if self.recompute_num_layers is not None:
            check_number("recompute_num_layers", self.recompute_num_layers)
        if self.activation_offload_limit is not None:
            check_number("activation_offload_limit", self.activation_offload_limit)
        if self.reentrant_recompute and self.recompute == "operation":
            raise ValueError('reentrant_recompute: works for layers and modules, not for recompute="operation"')
        if not callable(self.compile_backend) and self.compile_backend is not None:
            check_choice("compile_backend", self.compile_backend, Literal["inductor", "aot_eager", "eager"])
        if self.cuda_graphs:
            self._check_graphs()
        if self.cpu_offload and self.data_parallel_mode != "fsdp2":
            raise ValueError(
                f"cpu_offload: needs sharded parameters, but data_parallel_mode is {self.data_parallel_mode}: use "
                "fsdp2, which also works in one process"
            )

    def _check_graphs(self) -> None:
        if self.data_parallel_mode == "fsdp2":
            raise ValueError("cuda_graphs: need parameters that stay in place, which fsdp2 gathers: use ddp or none")
        if self.recompute != "layer" or self.recompute_num_layers is not None or self.compile_backend is None:
            raise ValueError('cuda_graphs: need layers that are compiled, all of them with recompute="layer"')
        if self.fp8 != "none" or self.activation_offload_limit is not None:
            raise ValueError("cuda_graphs: cannot contain what fp8 or activation_offload_limit do between layers")


@dataclass(frozen=True)
class ParallelModel:
    """A parallelized model: `module` owns the parameters under their own names; call `forward` to compute.

    reshards: whether gathered parameters are freed after forward passes. sketch: if `module` is a stage of a pipeline,
    the whole model, on the meta device.
    """

    module: nn.Module
    forward: nn.Module
    mesh: Mesh
    fp8_weights: Fp8Weights | None = None
    reshards: bool = True
    sketch: nn.Module | None = None

    def train(self, mode: bool = True) -> None:
        """Set training or evaluation mode, like `nn.Module.train`."""
        # Visiting about a thousand modules takes milliseconds, during which the device would be idle.
        if self.module.training != mode:
            self.module.train(mode)

    @torch.no_grad()
    def drop_replicated_gradients(self) -> None:
        """Under DDP, keep gradients of earlier calls on the first replica only. Call it before new micro-batches.

        They are sums over the replicas already, and DDP is about to sum whole gradients over the replicas again. With
        half-precision parameters, earlier gradients are set aside during passes instead.
        """
        if isinstance(self.forward, Replicated) and not self._in_half_precision and self.mesh.loss.rank:
            for parameter in self.forward.summed:
                if parameter.grad is not None:
                    parameter.grad.zero_()

    @contextmanager
    def accumulation(self, *, is_last: bool) -> Iterator[None]:
        """Context manager for the passes of one micro-batch; replicas reduce gradients only in the last micro-batch.

        With half-precision parameters, DDP reduces in every micro-batch: its buckets have the parameters' dtype, in
        which gradients must not be accumulated.
        """
        forward = self.forward
        if isinstance(forward, FSDPModule):
            forward.set_requires_all_reduce(is_last)
            if self.mesh.pp.size > 1 and not self.reshards:
                forward.set_reshard_after_backward(is_last)
        replicated = isinstance(forward, DistributedDataParallel)
        with forward.no_sync() if replicated and not is_last and not self._in_half_precision else nullcontext():
            yield

    @contextmanager
    def generation(self, *, keep_gathered: bool) -> Iterator[None]:
        """Context manager for the forward passes of generation: evaluation mode, no gradients, uncompiled layers.

        Layers are not compiled for the shapes of generation, and the code compiled for training is kept. keep_gathered
        keeps sharded parameters gathered between passes, until training or `drop_gathered` frees them.
        """
        self.train(False)
        with (
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            no_reshard_after_forward(self.module) if keep_gathered else nullcontext(),
        ):
            yield

    @cached_property
    def _units(self) -> list[FSDPModule]:
        return [module for module in self.module.modules() if isinstance(module, FSDPModule)]

    @cached_property
    def shares(self) -> Shares:
        """The parameters of which the modules of other ranks hold the rest, which FSDP2 does not gather."""
        return Shares(self.module, self.mesh)

    @property
    def whole(self) -> nn.Module:
        """The whole model, for names and, on the meta device, shapes; `module` itself without a pipeline."""
        return self.module if self.sketch is None else self.sketch

    @property
    def trained_names(self) -> list[str]:
        """The names of all trained parameters, also of those on other stages of a pipeline."""
        return [name for name, parameter in self.whole.named_parameters() if parameter.requires_grad]

    @property
    def has_buckets(self) -> bool:
        """Whether a forward pass may move gradients into buckets of the parameters' dtype, as those of DDP do."""
        return isinstance(self.forward, DistributedDataParallel)

    @property
    def is_sharded(self) -> bool:
        """Whether forward passes gather parameters."""
        return bool(self._units)

    @property
    def is_gathered(self) -> bool:
        """Whether the next forward pass gathers nothing: no parameter is sharded, or all are still gathered."""
        return is_gathered(self._units)

    @cached_property
    def divides_experts(self) -> bool:
        """Whether every forward pass is collective, because other ranks hold experts that its tokens need."""
        return bool(separate_experts(self.module))

    @cached_property
    def gathers_tokens(self) -> bool:
        """Whether layers need `SequenceLayout.most_tokens` to gather the tokens of all ranks for their experts."""
        return any(isinstance(experts.dispatcher, AllGather) for experts in separate_experts(self.module))

    def cuda_graph_capture(self) -> AbstractContextManager[None]:
        """Context manager, inside `generation`, for capturing the forward pass of a gathered model in a CUDA graph."""
        return without_streams(self.forward) if isinstance(self.forward, FSDPModule) else nullcontext()

    @property
    def _in_half_precision(self) -> bool:
        return any(
            parameter.dtype != torch.float32 for parameter in self.module.parameters() if parameter.requires_grad
        )

    def recover(self) -> None:
        """Reset the state of a forward or backward pass that failed on every rank, so that the next pass can run."""
        if isinstance(self.forward, DistributedDataParallel):
            # Otherwise the reducer would keep waiting for the missing gradients.
            reset_reducer(self.forward)
        reset_units(self.module)
        if self.fp8_weights is not None:
            self.fp8_weights.invalidate()

    def drop_gathered(self) -> None:
        """Free gathered copies of sharded parameters that a forward pass without a backward pass left behind.

        Call it after changing parameters; otherwise the next forward pass computes with the old values.
        """
        if self.fp8_weights is not None:
            self.fp8_weights.invalidate()
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    policy: ParallelPolicy,
    *,
    device: torch.device | str,
    fill: Callable[[nn.Module], None] | None = None,
    alone: bool = False,
) -> ParallelModel:
    """Apply `policy` to `model`, in place, and return it with the module to call.

    `model` is any module with `layers`, an nn.ModuleList of its repeated layers, which may be a property. It may also
    have `encoder_layers`, those of an encoder before them, which are sharded and recomputed, but not compiled.
    Recomputation, compilation and offloading need layers that are called with positional arguments.

    The steps, in order:

    1. Convert linear layers and experts to fp8.
    2. Set up recomputation inside the layers.
    3. Compile the layers, including the fp8 products and the recomputation.
    4. Put the layers into CUDA graphs, or offload the activations that they save; a compiled graph cannot contain this.
    5. Shard or replicate around the layers, so that a recomputed forward runs while its unit's parameters are gathered.

    Parameters on the meta device get memory on `device` after sharding, for this rank's part only. `fill` then sets
    their values, before DDP wraps the model. Each of `model.layers` is a unit of recomputation and of sharding. Experts
    are units of sharding too, if ranks hold different ones, and so are modules that stay in fp32, and `model.lm_head`,
    if there is one; if the head is tied, the loss reads `model.head_weight`, which the embedding owns.

    Gradients are summed over the ranks, not averaged: divide by the number of tokens of all ranks, as `scale_and_clip_`
    does. Under ddp, only `forward` of the result reduces them, not the model itself. In the mode "none" nothing does;
    a mesh of several ranks is then refused, unless each computes `alone`, for a measurement.

    Raises ValueError, before anything is changed, if `check_parallelizable` does, for a mesh with unsupported axes or
    with several ranks under "none", and for a `fill` that is missing or would not be called.
    """
    device = torch.device(device)
    check_parallelizable(model, policy, device.type)
    _check_kernels(model, policy)
    _check_mesh(mesh, policy, device, alone=alone)
    _check_fill(model, fill)
    _PARALLELIZED.add(model)
    layers, head = layers_of(model), getattr(model, "lm_head", None)
    encoder_layers = encoder_layers_of(model)
    convert_and_recompute_(model, policy, device.type)
    if policy.compile_backend is not None:
        compile_layers(list(layers), backend=policy.compile_backend, device_type=device.type)
    if policy.cuda_graphs:
        LayerGraphs().install(list(layers))
    if policy.activation_offload_limit is not None:
        ActivationOffload(device, limit_bytes=policy.activation_offload_limit).install(list(layers))
    if policy.data_parallel_mode == "fsdp2":
        last, experts = [head] if isinstance(head, nn.Module) else [], separate_experts(model)
        units = sharding_units(
            model, policy.unit_modules, [*encoder_layers, *layers, *last, *experts, *kept_in_fp32(model)]
        )
        with allow_integer_parameters():
            shard(
                model,
                mesh.fsdp,
                units,
                kept=last,
                meshes=dict.fromkeys(experts, mesh.expert_fsdp),
                param_dtype=policy.param_dtype,
                reshard_after_forward=policy.reshard_after_forward,
                cpu_offload=policy.cpu_offload,
                collectives=policy.collectives,
            )
        gather_in_order([[layer] for layer in encoder_layers], [], ahead=policy.forward_prefetch)
        groups = [[layer, *kept_in_fp32(layer), *separate_experts(layer)] for layer in layers]
        gather_in_order(groups, last, ahead=policy.forward_prefetch)
    if fill is not None and any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device="cpu" if policy.cpu_offload else device)
        fill(model)
    gather_as_stored(model)
    fp8_weights = Fp8Weights(model) if policy.fp8 == "tensorwise" else None
    divided = [] if mesh.ep is None else separate_experts(model)
    # DDP rejects models without trained parameters, which have no gradients to reduce anyway.
    is_replica = policy.data_parallel_mode == "ddp" and trained_in_replicas(model, divided)
    forward = replicate(model, mesh, divided) if is_replica else model
    return ParallelModel(model, forward, mesh, fp8_weights, policy.reshard_after_forward)


def convert_and_recompute_(model: nn.Module, policy: ParallelPolicy, device_type: str) -> None:
    """The first two steps of `parallelize`, which need neither memory nor other ranks."""
    encoder_layers, layers = encoder_layers_of(model), layers_of(model)
    if policy.fp8 != "none":
        convert_linears(layers, policy.fp8)
        convert_experts(layers, device_type)
    # Layers of an encoder that is not trained keep nothing.
    if any(parameter.requires_grad for parameter in encoder_layers.parameters()):
        # Modules that are recomputed in the decoder are not those of the encoder.
        part = policy.recompute if isinstance(policy.recompute, str) else "none"
        recompute_layers(encoder_layers, part, reentrant=policy.reentrant_recompute)
    recompute_layers(
        layers,
        policy.recompute,
        num_layers=policy.recompute_num_layers,
        experts=policy.recompute_experts,
        reentrant=policy.reentrant_recompute,
        compiled=policy.compile_backend is not None,
    )


def _check_kernels(model: nn.Module, policy: ParallelPolicy) -> None:
    if policy.cuda_graphs and (refusal := kernels_refusal(layers_of(model))) is not None:
        raise ValueError(f"cuda_graphs: {refusal}")


def _check_mesh(mesh: Mesh, policy: ParallelPolicy, device: torch.device, *, alone: bool) -> None:
    """Raise ValueError for a mesh that does not suit the device or the policy. Collective."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh: must be an xorl.core.mesh.Mesh, got {type(mesh).__name__}")
    if device.type != mesh.device_type:
        raise ValueError(f"device: is {device}, but the mesh is one of {mesh.device_type} devices")
    if mesh.dims.pp > 1 and policy.data_parallel_mode == "ddp":
        raise ValueError("data_parallel_mode: ddp cannot train a stage of a pipeline; use fsdp2, with replicas")
    if policy.data_parallel_mode == "none" and mesh.loss.size > 1 and not alone:
        raise ValueError(
            f"data_parallel_mode: none is for one rank, and the {mesh.loss.size} ranks of this mesh would diverge; "
            "use fsdp2 or ddp"
        )
    if policy.data_parallel_mode == "fsdp2":
        uses_copy_engines(mesh.fsdp, policy.collectives)


def _check_fill(model: nn.Module, fill: Callable[[nn.Module], None] | None) -> None:
    """Raise ValueError for a fill that is missing or would not be called."""
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    if fill is None and is_meta:
        raise ValueError("fill: parameters are on the meta device; pass a function that sets their values")
    if fill is not None and not is_meta:
        raise ValueError("fill: would not be called, because no parameter is on the meta device; leave it out")


def separate_experts(model: nn.Module) -> list[Experts]:
    """The experts of all layers that are not replicated or sharded like the rest of the model.

    These are experts that ranks divide, and experts of layers whose other matrices ranks share.
    """
    return [
        module
        for module in model.modules()
        if isinstance(module, Experts) and (module.dispatcher is not None or module.ranks.size > 1)
    ]


def check_parallelizable(model: nn.Module, policy: ParallelPolicy, device_type: str) -> None:
    """Raise ValueError, naming the option, if `parallelize` cannot apply `policy` to this model on this machine.

    A model can be parallelized once. Changes nothing, and needs no device or other ranks; the model may be on the meta
    device.
    """
    check_type("policy", policy, ParallelPolicy, 'ParallelPolicy("fsdp2")')
    if model in _PARALLELIZED:
        raise ValueError(f"model: this {type(model).__name__} was parallelized before; build another one")
    layers, head = layers_of(model), getattr(model, "lm_head", None)
    if policy.fp8 != "none":
        if not fp8_linears(layers):
            raise ValueError(f'fp8: {policy.fp8}, but no layer of the model can be converted; set fp8="none"')
        check_experts(layers, device_type)
    if policy.compile_backend is not None:
        require_compiler(policy.compile_backend, device_type)
    if policy.cuda_graphs and (refusal := graphs_refusal(layers)) is not None:
        raise ValueError(f"cuda_graphs: {refusal}")
    if policy.data_parallel_mode != "fsdp2":
        return
    if policy.collectives != "auto" and device_type != "cuda":
        raise ValueError(f"collectives: {policy.collectives} is for GPUs, not for {device_type} devices; use auto")
    units = sharding_units(model, policy.unit_modules, list(layers))
    if isinstance(head, nn.Module):
        _check_head_unit(head, units)
    else:
        _check_tied_head(model, units)
    if policy.compile_backend is not None:
        _check_compiled_layers(layers, units)


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The repeated layers of `model`; raises ValueError if it does not name them."""
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"model: {type(model).__name__} has no `layers`, the nn.ModuleList of its repeated layers, which are "
            "placed one by one; add it, for example as a property that returns the list of an inner module"
        )
    return layers


def encoder_layers_of(model: nn.Module) -> nn.ModuleList:
    """The repeated layers of the encoder of `model`; maybe none."""
    layers = getattr(model, "encoder_layers", None)
    return layers if isinstance(layers, nn.ModuleList) else nn.ModuleList()


def _check_head_unit(head: nn.Module, units: Sequence[nn.Module]) -> None:
    """Raise ValueError for a unit inside the head, because the head reads its adapters' parameters directly."""
    inner = {module for module in head.modules() if module is not head}
    if within := sorted({type(unit).__name__ for unit in units if unit in inner}):
        raise ValueError(
            f"unit_modules: {', '.join(within)} is also part of the model's head, which must be a single unit: "
            "leave it out, or put no adapter on lm_head"
        )


def _check_compiled_layers(layers: nn.ModuleList, units: Sequence[nn.Module]) -> None:
    """Raise ValueError for a unit inside a layer, because a layer's graph cannot contain the gather of a unit."""
    inner = {module for layer in layers for module in layer.modules() if module is not layer}
    if within := sorted({type(unit).__name__ for unit in units if unit in inner}):
        raise ValueError(
            f"unit_modules: {', '.join(within)} is inside a layer, but compile_backend compiles each "
            "layer to one graph: leave it out, or set compile_backend=None"
        )


def _check_tied_head(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Raise ValueError for a unit that owns the tied head's weight, which it would free before the head runs."""
    head_weight = getattr(model, "head_weight", None)
    for unit in units:
        if any(parameter is head_weight for parameter in unit.parameters()):
            raise ValueError(
                f"unit_modules: {type(unit).__name__} owns the weight of the model's tied head, which is also "
                "used outside of that module: leave it out"
            )
