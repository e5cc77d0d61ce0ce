"""train.recompute_policy: auto. Finds the fastest setting of recomputation whose memory fits, before training.

A few layers of the model run one forward and backward pass on the largest micro-batch, alone on each rank: a rank that
runs out of memory keeps no other waiting, and ranks talk only to agree on the outcome. What a layer adds is multiplied
by the number of layers; parameters, their copies in fp8, gradients and optimizer state are counted. A setting is for as
few layers, from the first, as it takes; those after them keep everything.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn

from xorl.config import Config, LoraConfig, TrainConfig
from xorl.core.loss import LossFn, cross_entropy
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.models import Decoder, DecoderConfig
from xorl.core.nn.fp8 import Fp8Linear, convert_linears
from xorl.core.parallel import ParallelModel, has_copy_engines
from xorl.core.parallel.copy_engine import WINDOW_BYTES
from xorl.core.runtime import rng_state, set_rng_state
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.quant import E4M3
from xorl.lora import stored_parameters
from xorl.train.adapters.inject import adapter_spec, add_adapters
from xorl.train.architecture import Architecture
from xorl.train.model import DTYPES, KeptDtypes, build_model, head_options_of, sketch_model

logger = logging.getLogger(__name__)

# From fastest to leanest, as the options that they stand for.
SETTINGS: MappingProxyType[str, dict[str, object]] = MappingProxyType(
    {
        "none": {"recompute_policy": "module", "enable_gradient_checkpointing": False},
        "operation": {"recompute_policy": "operation"},
        "layer": {"recompute_policy": "module"},
        "layer and offload": {"recompute_policy": "module", "enable_activation_offload": True},
    }
)
# Those that can be for some layers alone: offloading is for all.
BY_LAYER = ("operation", "layer")
# They tell what a layer adds. With activations on their way to the host, the third layer is the first typical one.
DEPTHS = (3, 5)
# What is left for NCCL, the libraries' workspaces, and gaps between allocations.
USABLE = 0.92
# States of the optimizer per parameter; what muon keeps is counted as if it were AdamW everywhere.
NUM_STATES = MappingProxyType({"adamw": 2, "anyprecision_adamw": 2, "muon": 2, "sgd": 0})


@dataclass(frozen=True)
class MicroBatch:
    """The largest micro-batch of a run: its tokens, and those of the longest document in it."""

    num_tokens: int
    longest: int

    @classmethod
    def of(cls, config: Config, longest: int) -> MicroBatch:
        """`longest` is the longest document of the data."""
        data = config.data
        tokens = config.train.micro_batch_size * data.sample_packing_sequence_len
        padded = math.ceil(tokens / data.pad_to_multiple_of) * data.pad_to_multiple_of
        return cls(padded, min(longest, data.sample_packing_sequence_len))

    def layout(self, device: torch.device) -> SequenceLayout:
        """Documents of the greatest length, and one of what is left."""
        full, rest = divmod(self.num_tokens, self.longest)
        return SequenceLayout.from_lengths([self.longest] * full + [rest] * (rest > 0), device)


def choose_recomputation(
    config: Config, architecture: Architecture, mesh: Mesh, device: torch.device, batch: MicroBatch
) -> TrainConfig:
    """The options of `config` with `auto` replaced by what was found; collective. The table found is logged.

    No random number is drawn, and no data is read.
    """
    if device.type != "cuda":
        logger.info("recompute_policy=auto setting=none: host memory has no limit that could be found by a probe")
        return _with(config.train, "none")
    free, _ = torch.cuda.mem_get_info(device)
    usable = USABLE * (free + torch.cuda.memory_reserved(device))
    fixed = placed_bytes(config, architecture, mesh, by_copy_engines=has_copy_engines(mesh.fsdp))
    num_layers = architecture.config.num_layers
    choices: list[Choice] = []
    peaks: list[Peak] = []
    for name in SETTINGS:
        peak = measure_peak(config, name, architecture, mesh, device, batch)
        # Every rank comes here for every setting, whatever happened to it, so this meets its peers.
        outcome = torch.tensor([fixed + peak.start, peak.per_layer, -usable], dtype=torch.float64, device=device)
        dist.all_reduce(outcome, op=dist.ReduceOp.MAX)
        start, per_layer, most = outcome.tolist()
        peaks.append(Peak(start, per_layer))
        choices.append(choose_layers(name, peaks[-1], peaks[0], num_layers, -most))
        if choices[-1].fits:
            break
    logger.info("%s", table(choices))
    return _with(config.train, choices[-1].setting, choices[-1].num_layers)


@dataclass(frozen=True)
class Peak:
    """Bytes at the peak of a pass: those that each layer adds, and all others. Infinite where memory ran out."""

    start: float
    per_layer: float

    def of(self, num_layers: int) -> float:
        """Bytes for so many layers."""
        return self.start + self.per_layer * num_layers

    @classmethod
    def through(cls, measured: dict[int, float]) -> Peak:
        """The line through what was measured by depth: one depth is the model's own."""
        if math.inf in measured.values():
            return cls(math.inf, 0.0)
        if len(measured) == 1:
            return cls(next(iter(measured.values())), 0.0)
        (few, least), (more, most) = sorted(measured.items())
        per_layer = max(0.0, most - least) / (more - few)
        return cls(least - per_layer * few, per_layer)


@dataclass(frozen=True)
class Choice:
    """A setting in the first `num_layers` layers (None: in all); bytes needed, and usable, over all ranks."""

    setting: str
    num_layers: int | None
    needed: float
    usable: float

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory."""
        return self.needed <= self.usable

    def __str__(self) -> str:
        return self.setting if self.num_layers is None else f"{self.setting} in {self.num_layers} layers"


def choose_layers(setting: str, peak: Peak, whole: Peak, num_layers: int, usable: float) -> Choice:
    """`setting` in as few of `num_layers` layers as it takes, where the others keep everything, as `whole` tells."""
    if setting in BY_LAYER:
        for count in range(1, num_layers):
            # Where the backward pass begins, and where it comes to these layers and what the others kept is gone.
            needed = max(whole.of(num_layers - count) + peak.per_layer * count, peak.of(count))
            if needed <= usable:
                return Choice(setting, count, needed, usable)
    return Choice(setting, None, peak.of(num_layers), usable)


def table(choices: Sequence[Choice]) -> str:
    """What was found, a line for each setting tried; the last one is taken."""
    lines = [
        f"recompute_policy=auto setting='{choice}' needed_gib={_gib(choice.needed)} usable_gib={_gib(choice.usable)}"
        for choice in choices
    ]
    last = choices[-1]
    advice = "" if last.fits else ": even this may not fit; lower train.micro_batch_size or shard over more GPUs"
    return "\n".join([*lines, f"recompute_policy=auto takes {last}{advice}"])


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}" if math.isfinite(num_bytes) else "more"


def _with(train: TrainConfig, setting: str, num_layers: int | None = None) -> TrainConfig:
    return train.model_copy(update={**SETTINGS[setting], "recompute_num_layers": num_layers})


def placed_bytes(config: Config, architecture: Architecture, mesh: Mesh, *, by_copy_engines: bool = False) -> float:
    """What a rank holds besides activations: what it keeps, and what is gathered and on its way between ranks.

    by_copy_engines: whether sharded parameters are gathered, and their gradients reduced, by these.
    """
    train = config.train
    module, dtypes = _sketch(config, architecture), KeptDtypes.of(train, config.lora)
    compute = _compute_itemsize(train)
    whole, layers = (_Size.of(part, compute, dtypes.frozen.itemsize) for part in (module, module.layers))
    kept = _kept_bytes(train, whole, dtypes, mesh.dims)
    if train.data_parallel_mode != "fsdp2":
        return kept
    # All layers but the one that computes and the one gathered ahead.
    others = 1 - 2 / len(module.layers)
    gathered = whole.gathered_bytes - (others if train.enable_full_shard else 0) * layers.gathered_bytes
    # Gradients, whole and on their way: for NCCL in fp32, through copy engines as they are.
    travelling, windows = (compute, WINDOW_BYTES) if by_copy_engines else (torch.float32.itemsize, 0)
    in_flight = (whole.trained - others * layers.trained) * (compute + travelling)
    return (0.0 if train.enable_cpu_offload else kept) + gathered + in_flight + windows


def kept_bytes(config: Config, architecture: Architecture, dims: ParallelDims) -> float:
    """What a rank keeps in a step, on the device or the host: parameters, gradients, optimizer state, fp8 copies."""
    dtypes = KeptDtypes.of(config.train, config.lora)
    whole = _Size.of(_sketch(config, architecture), _compute_itemsize(config.train), dtypes.frozen.itemsize)
    return _kept_bytes(config.train, whole, dtypes, dims)


def _sketch(config: Config, architecture: Architecture) -> Decoder:
    """The model's shape, with those layers in fp8 that keep copies of their weights."""
    module = sketch_model(architecture, config.model, config.train, config.lora)
    if config.train.fp8 == "tensorwise":
        convert_linears(module.layers, "tensorwise")
    return module


def _compute_itemsize(train: TrainConfig) -> int:
    return 2 if train.enable_mixed_precision else 4


def _kept_bytes(train: TrainConfig, whole: _Size, dtypes: KeptDtypes, dims: ParallelDims) -> float:
    kept = dtypes.trained.itemsize
    state = kept if train.optimizer == "adamw" else DTYPES[train.optimizer_dtype].itemsize
    of_trained = kept + _gradient_bytes(train, dtypes.trained, dims) + NUM_STATES[train.optimizer] * state
    return (whole.trained * of_trained + whole.frozen_bytes + whole.fp8_bytes) / dims.dp_shard


def _gradient_bytes(train: TrainConfig, dtype: torch.dtype, dims: ParallelDims) -> int:
    """Of a parameter, at the end of a step's last pass."""
    if train.gradient_accumulation_steps == 1 or dtype == torch.float32:
        return dtype.itemsize
    # Earlier micro-batches' sum is fp32, and the newest gradient is apart from it until its pass is over. Replicas of
    # shards keep the sum alone: it becomes the gradient once it was exchanged.
    is_hsdp = train.data_parallel_mode == "fsdp2" and dims.dp_replicate > 1
    return torch.float32.itemsize + (0 if is_hsdp else dtype.itemsize)


@dataclass(frozen=True)
class _Size:
    """The number of trained parameters, and bytes: of frozen ones as they are kept, of fp8 copies, of all gathered."""

    trained: int
    frozen_bytes: int
    fp8_bytes: int
    gathered_bytes: int

    @classmethod
    def of(cls, module: nn.Module, compute: int, kept: int) -> _Size:
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
        return cls(trained, frozen * kept + stored_bytes, fp8, gathered + stored_bytes)


def measure_peak(
    config: Config, setting: str, architecture: Architecture, mesh: Mesh, device: torch.device, batch: MicroBatch
) -> Peak:
    """Peak memory of a forward and backward pass beyond parameters and gradients."""
    num_layers = architecture.config.num_layers
    depths = DEPTHS if num_layers > max(DEPTHS) else (num_layers,)
    measured: dict[int, float] = {}
    for depth in depths:
        try:
            measured[depth] = measure_slice(config, setting, architecture, depth, mesh, device, batch)
        except torch.OutOfMemoryError:
            measured[depth] = math.inf
        gc.collect()  # layers and their wrapped forward functions refer to each other
        torch.cuda.empty_cache()
    return Peak.through(measured)


def measure_slice(
    config: Config,
    setting: str,
    architecture: Architecture,
    num_layers: int,
    mesh: Mesh,
    device: torch.device,
    batch: MicroBatch,
) -> float:
    """Run the first `num_layers` layers, unsharded, under `setting`; the bytes taken at the peak, 0 on a CPU."""
    sharded = config.train.data_parallel_mode == "fsdp2"
    # Sharded parameters are gathered in the dtype that is computed in.
    dtype = "bf16" if sharded and config.train.enable_mixed_precision else config.train.param_dtype
    alone = {"data_parallel_mode": "none", "enable_cpu_offload": False, "param_dtype": dtype, "init_device": "meta"}
    train = _with(config.train, setting).model_copy(update=alone)
    part = replace(architecture, config=_first_layers(architecture.config, num_layers))
    lora = _for_few_layers(config.lora, part)
    loss_fn = partial(cross_entropy, **head_options_of(config.model, train))
    before = rng_state(device)
    try:
        model = build_model(part, config.model, train, lora, mesh, device, fill_=_fill_with_zeros)
        _pass(model, device, batch, loss_fn)  # compiles, and makes the gradients
        if device.type != "cuda":
            return 0.0
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        _pass(model, device, batch, loss_fn)
        return float(torch.cuda.max_memory_allocated(device) - held)
    finally:
        set_rng_state(before, device)


def _for_few_layers(lora: LoraConfig, part: Architecture) -> LoraConfig:
    """`lora`, or adapters on all that there is where it names layers by numbers that the first few do not have."""
    with torch.device("meta"):
        module = part.spec.build(part.config)
    if lora.adapter_path is not None:
        lora = _by_options(lora)
    if lora.exclude_modules:
        # What they leave unquantised takes no memory of its own in the passes that are measured.
        lora = lora.model_copy(update={"exclude_modules": None})
    try:
        add_adapters(module, lora, part.spec.adapter_targets)
    except ValueError:
        return lora.model_copy(
            update={"lora_target_modules": "all-linear", "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": []}
        )
    return lora


def _by_options(lora: LoraConfig) -> LoraConfig:
    """Adapters of the size of those that `lora.adapter_path` names, which are for a model with all of its layers."""
    spec = adapter_spec(lora, ())
    assert spec is not None, "there are adapters to go on from"
    return lora.model_copy(
        update={
            "adapter_path": None,
            "lora_rank": max(spec.rank_of(name) for name in spec.targets),
            "lora_target_modules": sorted({name.rpartition(".")[2] for name in spec.targets}),
            "use_dora": spec.use_dora,
            "modules_to_save": list(spec.modules_to_save),
        }
    )


def _first_layers(config: DecoderConfig, num_layers: int) -> DecoderConfig:
    return replace(
        config,
        num_layers=num_layers,
        windows=config.windows[:num_layers],
        attention_scales=config.attention_scales[:num_layers],
    )


@torch.no_grad()
def _fill_with_zeros(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.zero_()


def _pass(model: ParallelModel, device: torch.device, batch: MicroBatch, loss_fn: LossFn) -> None:
    ids = torch.zeros(batch.num_tokens, dtype=torch.int64, device=device)
    output = model.forward(
        ids, batch.layout(device), loss=lambda hidden, weight: loss_fn(hidden, weight, {"labels": ids})
    )
    output.sum.backward()
