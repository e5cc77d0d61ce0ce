"""Layouts similar to that of a configuration, with the same rows in a step, as options that its checks accept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from xorl.config import Config, load_config
from xorl.config.conflicts import check_world_size
from xorl.config.problems import ConfigError
from xorl.core.mesh import ParallelDims
from xorl.core.models import Decoder
from xorl.train.architecture import Architecture
from xorl.train.model import check_options, check_ranks, sketch_model
from xorl.train.startup import parallel_dims

Options = Mapping[str, object]

# Options that turn recomputation off, and CUDA graphs, which need it.
NOTHING_RECOMPUTED: Options = {
    "train.enable_cuda_graphs": False,
    "train.enable_gradient_checkpointing": False,
    "train.recompute_policy": "module",
    "train.recompute_num_layers": None,
    "train.recompute_modules": None,
    "train.moe_checkpoint_method": None,
    "train.enable_activation_offload": False,
    "train.enable_reentrant": False,
}
SETTINGS: Mapping[str, Options] = {
    "none": {},
    "operation": {"train.enable_gradient_checkpointing": True, "train.recompute_policy": "operation"},
    "layer": {"train.enable_gradient_checkpointing": True},
}
IN_GRAPHS: Options = {**NOTHING_RECOMPUTED, **SETTINGS["layer"], "train.enable_cuda_graphs": True}


@dataclass(frozen=True)
class Candidate:
    """A configuration for some ranks, and the options by which it differs from that of the file."""

    config: Config
    dims: ParallelDims
    options: Options

    def value(self, name: str) -> object:
        """The value of an option."""
        return value_of(self.config, name)

    @property
    def bins_per_step(self) -> int:
        """Rows of a step, over all ranks."""
        train = self.config.train
        readers = self.dims.dp_replicate * self.dims.dp_shard
        return train.micro_batch_size * train.gradient_accumulation_steps * readers


class Checks:
    """Resolves options as a run would, and refuses what it would refuse.

    Args:
        overrides: those of the command line, which stay unless a candidate has others.
    """

    def __init__(self, path: Path, overrides: tuple[str, ...], architecture: Architecture, num_gpus: int) -> None:
        self._path = path
        self._overrides = overrides
        self._architecture = architecture
        self._num_gpus = num_gpus
        self._sketch: Decoder | None = None

    def candidate(self, options: Options, *, builds: bool = True) -> Candidate:
        """The configuration with these options. Raises ValueError, as a run would, if it is not possible.

        builds: whether to build the model's shape, too, as a run does.
        """
        given = [*self._overrides, *(argument(name, value) for name, value in options.items())]
        config = load_config(self._path, given).config
        check_world_size(config, self._num_gpus)
        dims = parallel_dims(config, self._num_gpus)
        check_options(self._architecture.config, config.model, config.train, config.lora)
        if builds:
            check_ranks(self._sketch_of(config), config.model, config.train, "cuda")
        return Candidate(config, dims, options)

    def accepted(self, options: Options, *, builds: bool = True) -> Candidate | None:
        """As `candidate`; None if a run would refuse the options."""
        try:
            return self.candidate(options, builds=builds)
        except (ConfigError, ValueError):
            return None

    def _sketch_of(self, config: Config) -> Decoder:
        """The whole model, which is the same for all candidates."""
        if self._sketch is None:
            self._sketch = sketch_model(self._architecture, config.model, config.train, config.lora)
        return self._sketch


def argument(name: str, value: object) -> str:
    """An option as an argument of a command."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"--{name}={text}"


def value_of(config: Config, name: str) -> object:
    """The value of an option by its path."""
    section, option = name.split(".")
    return getattr(getattr(config, section), option)


def sizes_near(config: Config, num_gpus: int, *, has_experts: bool) -> Iterator[Options]:
    """Parallel sizes: those with one axis of another size, those with one axis alone, and pairs of axes of two.

    The ranks that are left read different data and shard the parameters.
    """
    train = config.train
    own = tuple(train.model_parallel_sizes.values())
    ones = (1,) * len(own)
    powers = [2**exponent for exponent in range(1, num_gpus.bit_length()) if num_gpus % 2**exponent == 0]
    found = [own, ones]
    for base in (own, ones):
        found += [(*base[:place], size, *base[place + 1 :]) for place in range(len(own)) for size in (1, *powers)]
    found += [
        tuple(2 if place in pair else 1 for place in range(len(own))) for pair in combinations(range(len(own)), 2)
    ]
    for sizes in dict.fromkeys(found):
        ranks = math.prod(sizes)
        if num_gpus % ranks:
            continue
        chosen = {f"train.{name}": size for name, size in zip(train.model_parallel_sizes, sizes, strict=True)}
        chosen |= {"train.data_parallel_shard_size": -1, "train.data_parallel_replicate_size": -1}
        is_alone = ranks == num_gpus and sizes[2:] == (1, 1)
        shared = num_gpus // sizes[1]
        if is_alone:
            yield chosen | {"train.data_parallel_mode": "none", "train.expert_parallel_size": 1}
            if not has_experts or shared == 1:
                continue
        for ep in (1, *(size for size in powers if shared % size == 0)) if has_experts else (1,):
            # Keeping what was gathered pays where ranks do little else to save memory.
            keeps = sizes == ones or not train.enable_full_shard or sizes[1] > 1
            for full in (True, False) if keeps else (True,):
                yield chosen | {
                    "train.data_parallel_mode": "fsdp2",
                    "train.expert_parallel_size": ep,
                    "train.enable_full_shard": full,
                    "train.reshard_after_forward": full,
                }
        if num_gpus > 1 and (sizes == ones or train.data_parallel_mode == "ddp"):
            for ep in sorted({1, shared} if has_experts else {1}):
                yield chosen | {"train.data_parallel_mode": "ddp", "train.expert_parallel_size": ep}


def batches(bins_per_step: int, micro_batch_size: int, num_readers: int) -> list[dict[str, int]]:
    """Micro-batches of other sizes with which ranks that read different rows make a step of so many.

    First the size nearest to `micro_batch_size`, then smaller ones, then twice as large ones. None if nothing divides.
    """
    if bins_per_step % num_readers:
        return []
    of_rank = bins_per_step // num_readers
    sizes = [size for size in range(1, of_rank + 1) if of_rank % size == 0]
    nearest = min(sizes, key=lambda size: (abs(math.log(size / micro_batch_size)), size))
    wanted = [nearest, *sorted((size for size in sizes if size < nearest), reverse=True)]
    wanted += [2 * nearest] * (2 * nearest in sizes)
    return [
        {"train.micro_batch_size": size, "train.gradient_accumulation_steps": of_rank // size}
        for size in dict.fromkeys(wanted)
    ]
