"""Plans a run: estimates its configuration and similar layouts, best first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from xorl.config import Config
from xorl.config.problems import ConfigError
from xorl.train.architecture import Architecture
from xorl.train.plan.estimate import Estimate, Estimator
from xorl.train.plan.layouts import (
    IN_GRAPHS,
    NOTHING_RECOMPUTED,
    SETTINGS,
    Candidate,
    Checks,
    Options,
    batches,
    sizes_near,
    value_of,
)
from xorl.train.plan.rates import Rates

# Terms that a GPU spends on its own computation.
COMPUTING = ("products", "attention", "experts", "recurrences", "elements")
# From this share of a step on, something other than computation is what limits it.
NOTABLE = 0.1
MAX_GPUS = 8
UNPLANNED = {
    "train.enable_cpu_offload": "parameters in host memory",
    "lora.sweep": "a sweep; plan one of its members",
}


@dataclass(frozen=True)
class Row:
    """A layout and its estimate. is_configured: whether it is that of the configuration."""

    candidate: Candidate
    estimate: Estimate
    is_configured: bool = False

    @property
    def tokens_per_step(self) -> int:
        """Tokens of full rows, over all ranks."""
        return self.candidate.bins_per_step * self.candidate.config.data.sample_packing_sequence_len

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.tokens_per_step / self.estimate.step_s

    @property
    def micro_batch_size(self) -> int:
        return self.candidate.config.train.micro_batch_size

    def is_better_than(self, other: Row) -> bool:
        """Whether it fits and is faster, or needs less if neither fits."""
        if self.estimate.fits != other.estimate.fits:
            return self.estimate.fits
        if self.estimate.fits:
            return self.tokens_per_s > other.tokens_per_s
        return self.estimate.peak < other.estimate.peak

    @property
    def limit(self) -> tuple[str, float]:
        """The bottleneck of the layout, and its share of the memory or of a step."""
        if not self.estimate.fits:
            part = max(self.estimate.memory, key=lambda name: self.estimate.memory[name])
            return part, self.estimate.memory[part] / self.estimate.peak
        seconds, step_s = self.estimate.seconds, self.estimate.step_s
        others = {name: value for name, value in seconds.items() if name not in COMPUTING}
        largest = max(others, key=lambda name: others[name])
        if others[largest] < NOTABLE * step_s:
            largest = max(seconds, key=lambda name: seconds[name])
        return largest, seconds[largest] / step_s


@dataclass(frozen=True)
class Plan:
    """config: of the file. bins_per_step: rows of a step. rows: layouts that fit, fastest first, then the others.

    refusal: why `config` cannot run.
    """

    config: Config
    bins_per_step: int
    rows: Sequence[Row]
    refusal: str | None

    def config_value(self, name: str) -> object:
        """The value of an option in the configuration."""
        return value_of(self.config, name)

    @property
    def configured(self) -> Row | None:
        return next((row for row in self.rows if row.is_configured), None)


def check_plannable(config: Config, architecture: Architecture, num_gpus: int) -> None:
    """Raise ValueError for a configuration that plans do not cover."""
    if config.train.fp8 != "none" and architecture.config.has_experts:
        raise ValueError(f"train.fp8: {config.train.fp8}: plans do not cover experts in fp8; plan with none")
    if not 1 <= num_gpus <= MAX_GPUS:
        raise ValueError(
            f"--gpus {num_gpus}: links between hosts have not been measured; plan for one host, with 1 to {MAX_GPUS}"
        )
    for option, what in UNPLANNED.items():
        if value_of(config, option):
            raise ValueError(f"{option}: plans do not cover {what}; leave it out")


def make_plan(
    path: Path,
    overrides: tuple[str, ...],
    config: Config,
    architecture: Architecture,
    rates: Rates,
    num_gpus: int,
    longest: int,
) -> Plan:
    """Estimate the configuration on so many GPUs, and the layouts near it.

    longest: tokens of a document, of which rows are full.
    """
    checks = Checks(path, overrides, architecture, num_gpus)
    planner = _Planner(checks, Estimator(architecture, rates, longest), architecture)
    rows: list[Row] = []
    refusal = None
    try:
        own = checks.candidate({})
        rows.append(planner.configured(own))
        bins = own.bins_per_step
    except (ConfigError, ValueError) as error:
        refusal = str(error)
        train = config.train
        shared = math.prod(train.model_parallel_sizes.values())
        bins = train.micro_batch_size * train.gradient_accumulation_steps * max(num_gpus // shared, 1)
    for sizes in sizes_near(config, num_gpus, has_experts=architecture.config.has_experts):
        row = planner.best(sizes, bins, config.train.micro_batch_size)
        if row is not None and not any(_same(row, other) for other in rows):
            rows.append(row)
    rows.sort(key=lambda row: (not row.estimate.fits, -row.tokens_per_s if row.estimate.fits else row.estimate.peak))
    return Plan(config, bins, rows, refusal)


def _same(row: Row, other: Row) -> bool:
    return row.candidate.config == other.candidate.config


class _Planner:
    def __init__(self, checks: Checks, estimator: Estimator, architecture: Architecture) -> None:
        self._checks = checks
        self._estimator = estimator
        self._num_layers = architecture.config.num_layers

    def configured(self, own: Candidate) -> Row:
        """The configuration as it is; `recompute_policy: auto` is replaced by what it would take."""
        train = own.config.train
        if not (train.enable_gradient_checkpointing and train.recompute_policy == "auto"):
            return Row(own, self._estimator.estimate(own.config, own.dims), is_configured=True)
        row = self._with_recomputation({}, as_auto=True)
        assert row is not None, "auto is accepted, and so is what it takes"
        return replace(row, is_configured=True)

    def best(self, sizes: Options, bins: int, micro_batch_size: int) -> Row | None:
        """The fastest row of these parallel sizes that fits; None if a run would refuse all of them."""
        accepted = self._checks.accepted({**sizes, **NOTHING_RECOMPUTED})
        if accepted is None:
            return None
        readers = accepted.dims.dp_replicate * accepted.dims.dp_shard
        found: Row | None = None
        for batch in batches(bins, micro_batch_size, readers):
            is_larger = found is not None and batch["train.micro_batch_size"] > found.micro_batch_size
            if found is not None and found.estimate.fits and not is_larger:
                continue  # smaller micro-batches are slower
            options = {**sizes, **batch}
            for row in (self._with_recomputation(options), self._in_graphs(options)):
                if row is not None and (found is None or row.is_better_than(found)):
                    found = row
        return found

    def _in_graphs(self, options: Options) -> Row | None:
        """The row with layers in CUDA graphs; None if a run would refuse them or leave them out."""
        if options["train.data_parallel_mode"] == "fsdp2":
            return None
        candidate = self._checks.accepted({**options, **IN_GRAPHS})
        if candidate is None or not candidate.config.train.enable_cuda_graphs:
            return None
        return Row(candidate, self._estimator.estimate(candidate.config, candidate.dims))

    def _with_recomputation(self, options: Options, *, as_auto: bool = False) -> Row | None:
        """The first of nothing, `operation` and whole layers that fits, in as few layers as possible; or the leanest.

        as_auto: fits by what `recompute_policy: auto` assumes of gradients on their way.
        """

        def fits(estimate: Estimate) -> bool:
            return estimate.bound <= estimate.usable if as_auto else estimate.fits

        row = None
        for setting in SETTINGS.values():
            tried = self._row({**options, **NOTHING_RECOMPUTED, **setting})
            if tried is None:
                continue
            row = tried
            if fits(row.estimate):
                return self._in_fewer_layers(row, fits) if setting else row
        return row

    def _in_fewer_layers(self, row: Row, fits: Callable[[Estimate], bool]) -> Row:
        """The recomputation of `row`, which fits, in as few layers as fit."""
        low, high, found = 1, self._num_layers - 1, row
        while low <= high:
            count = (low + high) // 2
            train = row.candidate.config.train.model_copy(update={"recompute_num_layers": count})
            config = row.candidate.config.model_copy(update={"train": train})
            estimate = self._estimator.estimate(config, row.candidate.dims)
            if fits(estimate):
                options = {**row.candidate.options, "train.recompute_num_layers": count}
                found, high = Row(replace(row.candidate, config=config, options=options), estimate), count - 1
            else:
                low = count + 1
        return found

    def _row(self, options: Options) -> Row | None:
        candidate = self._checks.accepted(options, builds=False)
        if candidate is None:
            return None
        return Row(candidate, self._estimator.estimate(candidate.config, candidate.dims))
