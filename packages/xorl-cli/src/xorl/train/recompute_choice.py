"""train.recompute_policy: auto. Finds the fastest setting of recomputation whose memory fits, before training.

A few layers of the model, and all of its image encoder, run a forward and backward pass on the largest micro-batch,
alone on each rank: a rank that runs out of memory keeps no other waiting, and ranks only communicate to agree on the
outcome. `step_memory` predicts the peak of the whole model from it. A setting applies to the encoder and to as few
layers as possible, from the first; the layers after them keep all activations.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn

from xorl.config import Config
from xorl.config.local import LoraConfig, TrainConfig
from xorl.core.loss import cross_entropy
from xorl.core.mesh import Mesh
from xorl.core.models import Decoder
from xorl.core.nn.moe import MixtureOfExperts
from xorl.core.parallel import ParallelModel
from xorl.core.parallel.fsdp import uses_copy_engines
from xorl.core.runtime import rng_state, set_rng_state
from xorl.kernels.layout import SequenceLayout
from xorl.train.adapters.inject import SHARING_OPTIONS, adapter_spec, add_adapters
from xorl.train.architecture import Architecture
from xorl.train.data import padding_multiple
from xorl.train.images import largest_input
from xorl.train.model import build_model
from xorl.train.step_memory import (
    CudaMeter,
    Held,
    Meter,
    PassProfile,
    held_bytes,
    num_measured,
    pass_peak,
    profile_pass,
    profiled_param_dtype,
    ring_bytes,
)

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
# Settings that some layers can have alone: offloading is for all.
BY_LAYER = ("operation", "layer")
# The rest is for NCCL, workspaces of libraries, and gaps between allocations.
USABLE = 0.96


@dataclass(frozen=True)
class MicroBatch:
    """The largest micro-batch of a run: its tokens, those of its longest document, and the grids of its images."""

    num_tokens: int
    longest: int
    grids: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, config: Config, longest: int, grids: Sequence[tuple[int, int]] = ()) -> MicroBatch:
        """`longest` is the longest document of the data, `grids` those of the most images of a micro-batch.

        A rank that shares rows has only its part of the tokens, and encodes all images.
        """
        data, multiple = config.data, padding_multiple(config)
        tokens = config.train.micro_batch_size * data.sample_packing_sequence_len
        num_tokens = math.ceil(tokens / multiple) * multiple // config.train.context_parallel_size
        return cls(num_tokens, min(longest, data.sample_packing_sequence_len, num_tokens), (*grids,))

    def layout(self, device: torch.device) -> SequenceLayout:
        """Documents of the greatest length, and one of what is left."""
        full, rest = divmod(self.num_tokens, self.longest)
        return SequenceLayout.from_lengths([self.longest] * full + [rest] * (rest > 0), device)


def choose_recomputation(
    config: Config, architecture: Architecture, mesh: Mesh, device: torch.device, batch: MicroBatch
) -> TrainConfig:
    """The options of `config` with `auto` replaced by the setting found; collective. Logs every setting tried.

    Draws no random number and reads no data.
    """
    if device.type != "cuda":
        logger.debug("recompute_policy=auto setting=none: host memory has no limit that could be found by a probe")
        return _with(config.train, "none")
    usable = usable_bytes(device)
    by_copy_engines = uses_copy_engines(mesh.fsdp, config.train.fsdp_collectives)
    held = held_bytes(config, architecture, mesh.dims, by_copy_engines=by_copy_engines)
    # The measured passes attend within a rank, so they fetch nothing.
    beside = held.throughout + ring_bytes(config, architecture, batch.num_tokens)
    memory = torch.tensor([beside, -usable], dtype=torch.float64, device=device)
    dist.all_reduce(memory, op=dist.ReduceOp.MAX)
    throughout, negative_usable = memory.tolist()

    def profile(setting: str) -> PassProfile:
        # Every rank reaches this collective for every setting, also after it ran out of memory.
        flat = torch.tensor(
            measure(config, setting, architecture, mesh, device, batch).flat(), dtype=torch.float64, device=device
        )
        dist.all_reduce(flat, op=dist.ReduceOp.MAX)
        return PassProfile.of(flat.tolist())

    agreed = Held({"throughout": throughout}, held.gradient_ratio)
    choices = choose(profile, architecture.config.num_layers, agreed, -negative_usable)
    logger.debug("%s", table(choices))
    return _with(config.train, choices[-1].setting, choices[-1].num_layers)


def usable_bytes(device: torch.device) -> float:
    """Memory of a CUDA device that a step may take, with what the allocator holds already."""
    free, _ = torch.cuda.mem_get_info(device)
    return USABLE * (free + torch.cuda.memory_reserved(device))


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


def choose(profile: Callable[[str], PassProfile], num_layers: int, held: Held, usable: float) -> list[Choice]:
    """The settings tried, from fastest to leanest; the last one is the first that fits, or the leanest.

    profile: the profile of a setting's pass, the same on every rank.
    """
    choices: list[Choice] = []
    profiles: list[PassProfile] = []
    for setting in SETTINGS:
        profiles.append(profile(setting))
        choices.append(choose_layers(setting, profiles[-1], profiles[0], num_layers, held, usable))
        if choices[-1].fits:
            break
    return choices


def choose_layers(
    setting: str, profile: PassProfile, whole: PassProfile, num_layers: int, held: Held, usable: float
) -> Choice:
    """`setting` in as few of `num_layers` layers as fit; the other layers keep everything, as in `whole`."""

    def needed(count: int) -> float:
        profiles = [profile] * count + [whole] * (num_layers - count)
        return held.throughout + pass_peak(profiles, held.gradient_ratio)

    if setting in BY_LAYER:
        for count in range(1, num_layers):
            if (num_bytes := needed(count)) <= usable:
                return Choice(setting, count, num_bytes, usable)
    return Choice(setting, None, needed(num_layers), usable)


def table(choices: Sequence[Choice]) -> str:
    """A line for each setting tried; the last one is taken."""
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


def measure(
    config: Config, setting: str, architecture: Architecture, mesh: Mesh, device: torch.device, batch: MicroBatch
) -> PassProfile:
    """The profile of a few layers under `setting`, on a CUDA device."""
    depth = num_measured(architecture.config)
    try:
        return measure_slice(config, setting, architecture, depth, mesh, device, batch, CudaMeter(device))
    except torch.OutOfMemoryError:
        return PassProfile.out_of_memory(depth)
    finally:
        gc.collect()  # layers and their wrapped forward functions refer to each other
        torch.cuda.empty_cache()


def measure_slice(
    config: Config,
    setting: str,
    architecture: Architecture,
    num_layers: int,
    mesh: Mesh,
    device: torch.device,
    batch: MicroBatch,
    meter: Meter,
) -> PassProfile:
    """The profile of the first `num_layers` layers, unsharded, under `setting`."""
    alone = {
        "data_parallel_mode": "none",
        "enable_cpu_offload": False,
        "param_dtype": profiled_param_dtype(config),
        "init_device": "meta",
    }
    train = _with(config.train, setting).model_copy(update=alone)
    config_of_part = replace(architecture.config, layers=architecture.config.layers[:num_layers])
    part = replace(architecture, config=config_of_part)
    lora = lora_of_few_layers(config.lora, part)
    before = rng_state(device)
    try:
        model = build_model(part, config.model, train, lora, mesh, device, fill_=_fill_with_zeros, alone=True)
        assert isinstance(model.module, Decoder)
        _pass(model, device, batch)  # compiles
        model.module.zero_grad(set_to_none=True)
        profile = profile_pass(model.module, lambda: _pass(model, device, batch), meter)
        return profile.holding(held_by_graphs(model.module, batch.num_tokens))
    finally:
        set_rng_state(before, device)


def held_by_graphs(model: Decoder, num_tokens: int) -> int:
    """Bytes of CUDA graphs of experts, which a measurement on a rank alone does not capture."""
    blocks = [block for block in model.modules() if isinstance(block, MixtureOfExperts)]
    return max((block.graph_bytes(num_tokens) for block in blocks), default=0)


def lora_of_few_layers(lora: LoraConfig, part: Architecture) -> LoraConfig:
    """`lora`, or adapters on all that there is where it names layers by numbers that the first few do not have."""
    with torch.device("meta"):
        module = part.spec.build(part.config)
    if lora.adapter_path is not None:
        lora = _by_options(lora, part)
    if lora.exclude_modules:
        # What they leave unquantised takes no memory of its own in the passes that are measured.
        lora = lora.model_copy(update={"exclude_modules": None})
    try:
        add_adapters(module, lora, part.spec)
    except ValueError:
        return lora.model_copy(
            update={
                "lora_target_modules": "all-linear",
                "rank_pattern": {},
                "alpha_pattern": {},
                "modules_to_save": [],
                **dict.fromkeys(SHARING_OPTIONS.values(), False),
                "moe_lora_format": None,
            }
        )
    return lora


def _by_options(lora: LoraConfig, part: Architecture) -> LoraConfig:
    """Adapters of the size of those that `lora.adapter_path` names, which are for a model with all of its layers."""
    spec = adapter_spec(lora, part.spec, part.config)
    assert spec is not None, "there are adapters to go on from"
    return lora.model_copy(
        update={
            "adapter_path": None,
            "lora_rank": max([spec.rank, *spec.rank_pattern.values()]),
            "lora_target_modules": sorted({name.rpartition(".")[2] for name in spec.targets}),
            "use_dora": spec.use_dora,
            **{option: spec.expert_sharing == sharing for sharing, option in SHARING_OPTIONS.items()},
            "modules_to_save": list(spec.modules_to_save),
        }
    )


@torch.no_grad()
def _fill_with_zeros(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.zero_()


def _pass(model: ParallelModel, device: torch.device, batch: MicroBatch) -> None:
    ids, layout = torch.zeros(batch.num_tokens, dtype=torch.int64, device=device), batch.layout(device)
    assert isinstance(model.module, Decoder)
    inputs = largest_input(model.module, layout, batch.grids)
    output = model.forward(
        ids, layout, loss=lambda hidden, head: cross_entropy(hidden, head, {"labels": ids}), **inputs
    )
    output.sum.backward()
