"""Memory of a training step: what a rank holds throughout, and how much a pass adds over time.

A few layers run one forward and backward pass, alone on a rank, and each phase of the pass is measured: the embedding,
the forward pass of each layer, the head with the loss, the backward pass of each layer, the rest. `pass_peak` replays
these phases for the whole model. So it accounts for gradients that grow while the backward pass frees activations.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from xorl.config import Config
from xorl.config.fields import ParameterDtype
from xorl.config.local import TrainConfig
from xorl.core.mesh import ParallelDims
from xorl.core.models import Decoder, DecoderConfig
from xorl.core.models.stages import Stage
from xorl.core.nn.fp8 import Fp8Linear, convert_linears
from xorl.core.nn.moe import Experts
from xorl.core.parallel.copy_engine import WINDOW_BYTES
from xorl.kernels.quant.fp8 import E4M3
from xorl.lora.prequantized import stored_parameters
from xorl.train.architecture import Architecture
from xorl.train.layer_kernels import shared_kernels
from xorl.train.model import DTYPES, KeptDtypes, pipeline_stages, sketch_model

# States of the optimizer per parameter; muon is counted as if it were AdamW everywhere.
NUM_STATES = MappingProxyType({"adamw": 2, "anyprecision_adamw": 2, "muon": 2, "sgd": 0})
# The part of `Held` for gradients that are reduced.
IN_FLIGHT = "in flight"
# Layers of a profile that differ from those in the middle. With activations on their way to the host, the first layers
# do, whose activations have not left yet (one more if nothing below is trained), and the last ones, which keep theirs.
# Layers whose outputs get features of images, and the two after them, keep and free other tensors than the rest.
NUM_FIRST, NUM_LAST, NUM_AFTER_TAPS = 3, 2, 2


@dataclass(frozen=True)
class Phase:
    """Bytes of one phase of a pass, relative to those at its start.

    peak: the most at any time; kept: at its end, without gradients (negative if it frees activations); gradients: of
    parameters, made in this phase.
    """

    peak: float
    kept: float
    gradients: float


@dataclass(frozen=True)
class PassProfile:
    """The phases of a forward and backward pass. `backward` is in the order of the layers, not of time."""

    embedding: Phase
    forward: tuple[Phase, ...]
    head: Phase
    backward: tuple[Phase, ...]
    rest: Phase

    @classmethod
    def of(cls, values: Sequence[float]) -> PassProfile:
        """From what `flat` returns."""
        phases = [Phase(*values[first : first + 3]) for first in range(0, len(values), 3)]
        num_layers = (len(phases) - 3) // 2
        backward = phases[num_layers + 2 : -1]
        return cls(phases[0], (*phases[1 : num_layers + 1],), phases[num_layers + 1], (*backward[::-1],), phases[-1])

    def flat(self) -> list[float]:
        """All numbers, phases in the order of time."""
        phases = (self.embedding, *self.forward, self.head, *self.backward[::-1], self.rest)
        return [value for phase in phases for value in astuple(phase)]

    def holding(self, num_bytes: int) -> PassProfile:
        """The same pass with so many bytes held from its first phase on."""
        first = replace(self.embedding, peak=self.embedding.peak + num_bytes, kept=self.embedding.kept + num_bytes)
        return replace(self, embedding=first)

    @staticmethod
    def out_of_memory(num_layers: int) -> PassProfile:
        """The profile of a pass of so many layers that ran out of memory."""
        return PassProfile.of([math.inf, 0.0, 0.0] * (2 * num_layers + 3))


def pass_peak(
    profiles: Sequence[PassProfile], gradient_ratio: float, *, beside_backward: float = 0.0, beside_rest: float = 0.0
) -> float:
    """Bytes at the peak of a pass beyond what is held throughout the step.

    Args:
        profiles: for each layer of the model, the profile of its setting. The last one also says what the head takes.
        gradient_ratio: bytes that a pass adds for each byte of gradients in the profiles.
        beside_backward, beside_rest: bytes that exist only in the backward pass of the layers, and after it.
    """
    num_layers = len(profiles)
    first, last = profiles[0], profiles[-1]
    phases = [(first.embedding, 0.0)]
    phases += [(profile.forward[_measured(index, num_layers, profile)], 0.0) for index, profile in enumerate(profiles)]
    phases.append((last.head, 0.0))
    phases += [
        (profile.backward[_measured(index, num_layers, profile)], beside_backward)
        for index, profile in reversed([*enumerate(profiles)])
    ]
    phases.append((first.rest, beside_rest))
    held = peak = 0.0
    for phase, beside in phases:
        peak = max(peak, held + phase.peak + beside)
        held += phase.kept + gradient_ratio * phase.gradients
    return max(peak, held)


def num_measured(config: DecoderConfig) -> int:
    """The number of layers that a profile needs to stand for all of them."""
    num_tapped = 0 if config.images is None else len(config.images.taps) + NUM_AFTER_TAPS
    return min(max(NUM_FIRST, num_tapped) + 1 + NUM_LAST, config.num_layers)


def _measured(index: int, num_layers: int, profile: PassProfile) -> int:
    """The layer of a profile that is like layer `index` of the model."""
    measured = len(profile.forward)
    from_end, num_first = num_layers - index, measured - 1 - NUM_LAST
    if index < num_first or measured == num_layers:
        return index
    return measured - from_end if from_end <= NUM_LAST else num_first


class Meter(Protocol):
    """Counts the bytes allocated on a device."""

    def held(self) -> int:
        """Bytes allocated now."""
        ...

    def peak(self) -> int:
        """The most bytes allocated since `restart`."""
        ...

    def restart(self) -> None:
        """Start a new peak."""
        ...


class CudaMeter:
    """Reads the statistics of torch's allocator, which the host keeps: reading them waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def held(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def profile_pass(model: Decoder, run: Callable[[], None], meter: Meter) -> PassProfile:
    """The profile of `run`, one forward and backward pass of `model`, whose parameters have no gradients yet."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    phases: list[Phase] = []

    def gradients() -> int:
        return sum(parameter.grad.nbytes for parameter in trained if parameter.grad is not None)

    held, made = meter.held(), gradients()
    meter.restart()

    def mark() -> None:
        nonlocal held, made
        now, made_now = meter.held(), gradients()
        phases.append(Phase(meter.peak() - held, now - held - (made_now - made), made_now - made))
        held, made = now, made_now
        meter.restart()

    with _marked(model.layers, mark):
        run()
        mark()
    # The backward pass does not reach frozen layers below the first trained one.
    missing = 2 * len(model.layers) + 3 - len(phases)
    phases[-1:-1] = [Phase(0.0, 0.0, 0.0)] * missing
    return PassProfile.of([value for phase in phases for value in astuple(phase)])


@contextmanager
def _marked(layers: nn.ModuleList, mark: Callable[[], None]) -> Iterator[None]:
    """Call `mark` where the forward pass enters the first layer and leaves each, and where the backward pass does.

    Autograd stores the gradients of a layer's parameters before it goes on with the layer below.
    """

    def mark_backward(tensor: Tensor) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: mark())

    def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        mark()
        mark_backward(inputs[0])

    def after(_: nn.Module, __: object, output: Tensor | tuple[Tensor, object]) -> None:
        mark()
        mark_backward(output if isinstance(output, Tensor) else output[0])

    handles = [layers[0].register_forward_pre_hook(before)]
    handles += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Held:
    """The bytes on a rank's device besides activations.

    parts: bytes during the whole step, by what they are; gradient_ratio: bytes of gradients that a pass adds for each
    byte of gradients that a profiled pass makes, 0 where gradients exist throughout, or on the host.
    """

    parts: Mapping[str, float]
    gradient_ratio: float

    @property
    def throughout(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())


def held_bytes(
    config: Config,
    architecture: Architecture,
    dims: ParallelDims,
    *,
    by_copy_engines: bool = False,
) -> Held:
    """Bytes of parameters, gradients, optimizer state and communication buffers on a rank, without a pipeline.

    by_copy_engines: whether copy engines gather sharded parameters and reduce their gradients.
    """
    module = sketch_of(config, architecture)
    compute, frozen = gathered_itemsizes(config)
    # What other ranks hold of experts and matrices is not gathered, and a profiled pass does not have it either.
    own = module if dims.ep == dims.tp == 1 else sketch_of(config, architecture, dims=dims)
    whole, held, layers, encoder = (
        Sizes.of(part, compute, frozen) for part in (module, own, own.layers, own.encoder_layers)
    )
    num_layers = len(module.layers)
    return held_of(
        config, dims, whole, held, layers, num_layers=num_layers, by_copy_engines=by_copy_engines, encoder=encoder
    )


def gathered_itemsizes(config: Config) -> tuple[int, int]:
    """Bytes of a trained parameter as it is gathered, and of a frozen one that is not quantised."""
    compute = 2 if config.train.enable_mixed_precision else 4
    return compute, KeptDtypes.of(config.train, config.lora).frozen.itemsize


def held_of(
    config: Config,
    dims: ParallelDims,
    whole: Sizes,
    held: Sizes,
    layers: Sizes,
    *,
    num_layers: int,
    by_copy_engines: bool,
    encoder: Sizes | None = None,
) -> Held:
    """As `held_bytes`, from sizes of a stage: of all that ranks share, of what one rank has, and of that in layers.

    encoder: of the layers of an image encoder, of which some are gathered while no layer of the decoder is. They are
    taken for smaller than two of these.
    """
    train, dtypes = config.train, KeptDtypes.of(config.train, config.lora)
    compute = 2 if train.enable_mixed_precision else 4
    whole = held if dims.divides_replicas else whole
    parts, grown = _kept_bytes(train, whole, dtypes, dims)
    profiled = KeptDtypes.of(train.model_copy(update={"param_dtype": profiled_param_dtype(config)}), config.lora)
    ratio = grown / profiled.trained.itemsize / max(held.trained, 1)
    if train.data_parallel_mode != "fsdp2":
        return Held(parts, ratio)
    # All layers but the one that computes and the one gathered ahead.
    others, encoder = max(1 - 2 / num_layers, 0), encoder or NO_SIZE
    resharded = others * layers.gathered_bytes + encoder.gathered_bytes
    gathered = held.gathered_bytes - (resharded if train.enable_full_shard else 0)
    # Gradients, whole and on their way: for NCCL in fp32, through copy engines as they are.
    travelling, windows = (compute, WINDOW_BYTES) if by_copy_engines else (torch.float32.itemsize, 0)
    in_flight = (held.trained - others * layers.trained - encoder.trained) * (compute + travelling)
    if train.enable_cpu_offload:
        parts, ratio = {}, 0.0
    return Held({**parts, "gathered": gathered, IN_FLIGHT: in_flight + windows}, ratio)


def ring_bytes(config: Config, architecture: Architecture, num_tokens: int) -> float:
    """Bytes that a ring's attention needs at most for the keys and values it fetches, and for their gradients.

    Only one layer has them at a time. Both are held twice, as exchanged and in the order of the documents; gradients
    are in fp32. `num_tokens` is that of one rank.
    """
    train = config.train
    if train.ringattn_parallel_size == 1:
        return 0.0
    channels = max(
        max(each.num_kv_heads / train.ulysses_parallel_size, 1) * each.head_dim
        for each in architecture.config.attentions
    )
    elements = 2 * num_tokens * train.context_parallel_size * channels
    return elements * 2 * ((2 if train.enable_mixed_precision else 4) + torch.float32.itemsize)


def profiled_param_dtype(config: Config) -> ParameterDtype:
    """`train.param_dtype` of a profiled pass: sharded parameters are gathered in the dtype that is computed in."""
    train = config.train
    assert train.param_dtype is not None, "resolved by the configuration"
    is_gathered = train.data_parallel_mode == "fsdp2" and train.enable_mixed_precision
    return "bf16" if is_gathered else train.param_dtype


def kept_bytes(config: Config, architecture: Architecture, dims: ParallelDims) -> float:
    """Bytes that a rank keeps, on the device or the host: parameters, gradients, optimizer state, fp8 copies.

    Of a pipeline, the rank that keeps the most.
    """
    dtypes = KeptDtypes.of(config.train, config.lora)
    compute = 2 if config.train.enable_mixed_precision else 4
    most = 0.0
    for stage in pipeline_stages(config, architecture) if dims.pp > 1 else [None]:
        sketch = sketch_of(config, architecture, stage, dims if dims.divides_replicas else None)
        whole = Sizes.of(sketch, compute, dtypes.frozen.itemsize)
        parts, grown = _kept_bytes(config.train, whole, dtypes, dims)
        most = max(most, sum(parts.values()) + grown)
    return most


def _num_parts(dims: ParallelDims) -> int:
    """The number of ranks that share a matrix of a stage, or 1 if they share experts alone."""
    return 1 if dims.divides_replicas else dims.num_shards * dims.tp


def sketch_of(
    config: Config, architecture: Architecture, stage: Stage | None = None, dims: ParallelDims | None = None
) -> Decoder:
    """The model's shape, with those layers in fp8 that keep copies of their weights.

    stage: of a pipeline; None: all. dims: what a rank of these has of experts and matrices; None: all.
    """
    kernels = None if dims is None else shared_kernels(tp=dims.tp, ep=dims.ep)
    module = sketch_model(architecture, config.model, config.train, config.lora, kernels=kernels)
    if config.train.fp8 == "tensorwise":
        convert_linears(module.layers, "tensorwise")
    if stage is not None:
        module.keep(stage)
    return module


def _kept_bytes(
    train: TrainConfig, whole: Sizes, dtypes: KeptDtypes, dims: ParallelDims
) -> tuple[dict[str, float], float]:
    """Bytes that a rank keeps throughout a step, by what they are, and bytes of gradients that a pass adds."""
    kept = dtypes.trained.itemsize
    state = kept if train.optimizer == "adamw" else DTYPES[train.optimizer_dtype].itemsize
    summed, grown = _gradient_bytes(train, dtypes.trained, whole, dims)
    parts = {
        "parameters": whole.trained * kept + whole.frozen_bytes + whole.fp8_bytes,
        "gradients": summed,
        "optimizer": whole.trained * NUM_STATES[train.optimizer] * state,
    }
    return {name: num_bytes / _num_parts(dims) for name, num_bytes in parts.items()}, grown / _num_parts(dims)


def _gradient_bytes(train: TrainConfig, dtype: torch.dtype, whole: Sizes, dims: ParallelDims) -> tuple[int, int]:
    """Bytes of gradients that exist throughout the last pass of a step, and that this pass adds."""
    if train.gradient_accumulation_steps == 1:
        # Buckets of replicas keep the memory of their gradients from step to step. Divided experts are in none.
        own = whole.trained_experts if dims.divides_replicas else 0
        num_kept = whole.trained - own if train.data_parallel_mode == "ddp" else 0
        return num_kept * dtype.itemsize, (whole.trained - num_kept) * dtype.itemsize
    if dtype == torch.float32:
        return whole.trained * dtype.itemsize, 0
    # Earlier micro-batches are summed in fp32, and the newest gradients are separate until their pass is over. Replicas
    # of shards keep the sum alone: it becomes the gradient once it was exchanged.
    is_hsdp = train.data_parallel_mode == "fsdp2" and dims.num_replicas > 1
    return whole.trained * torch.float32.itemsize, 0 if is_hsdp else whole.trained * dtype.itemsize


@dataclass(frozen=True)
class Sizes:
    """The number of trained parameters, and bytes: of frozen ones as they are kept, of fp8 copies, of all gathered.

    trained_experts: the trained parameters of experts, which `trained` includes.
    """

    trained: int
    frozen_bytes: int
    fp8_bytes: int
    gathered_bytes: int
    trained_experts: int

    @classmethod
    def of(cls, module: nn.Module, compute: int, kept: int) -> Sizes:
        """compute: bytes of a trained parameter as it is gathered; kept: of a frozen one that is not quantised."""
        stored = stored_parameters(module).values()
        apart = {id(parameter) for parameter in stored}
        copied = {id(linear.weight) for linear in module.modules() if isinstance(linear, Fp8Linear)}
        stored_bytes = sum(value.numel() * value.element_size() for value in stored)
        trained = frozen = fp8 = gathered = 0
        for parameter in module.parameters():
            if id(parameter) in apart:
                continue
            num, is_trained, is_copied = parameter.numel(), parameter.requires_grad, id(parameter) in copied
            trained += num * is_trained
            frozen += num * (not is_trained)
            fp8 += num * is_copied * E4M3.itemsize
            gathered += num * (E4M3.itemsize if is_copied else compute if is_trained else kept)
        experts = [parameter for one in module.modules() if isinstance(one, Experts) for parameter in one.parameters()]
        of_experts = sum(parameter.numel() for parameter in experts if parameter.requires_grad)
        return cls(trained, frozen * kept + stored_bytes, fp8, gathered + stored_bytes, of_experts)

    def __add__(self, other: Sizes) -> Sizes:
        return Sizes(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: Sizes) -> Sizes:
        return Sizes(*map(operator.sub, astuple(self), astuple(other)))


NO_SIZE = Sizes(0, 0, 0, 0, 0)
