"""run_bench: trains a few steps, with xorl and with other trainers in turn, and says how fast each was.

What is measured is a run as `xorl train` builds it, by its own loop and observer. A peer takes the engine's place in it
(peers.py), so that all read the same batches, follow the same schedule and are timed by the same marks.
"""

from __future__ import annotations

import gc
import logging
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from xorl.config import Config, LoadedConfig
from xorl.core import runtime
from xorl.lora import num_parameters
from xorl.train.bench.environment import environment
from xorl.train.bench.kernel_summary import KernelSummary, summarise
from xorl.train.bench.memory import build_engine_that_fits
from xorl.train.bench.peers import Peer, settings_of_peers
from xorl.train.bench.report import Measurement, Record, Work, write_record
from xorl.train.build import EngineMaker, Run, build_run
from xorl.train.loop import train
from xorl.train.model import read_architecture
from xorl.train.observe.observer import Metrics
from xorl.train.observe.profile import Profiler
from xorl.train.observe.progress import set_up_logging

logger = logging.getLogger(__name__)

OWN = "xorl"


@dataclass(frozen=True)
class BenchOptions:
    """What to measure, beside the configuration.

    peers run in turn with xorl, `rounds` times each. Of each build's steps the first `warmup` are not measured, nor is
    the first of several rounds counted where packs differ (report.py). profile adds one more, recorded step to xorl's
    last build. started_at is when the command was given, in seconds of the epoch. append_to is a Markdown file that the
    record is added to.
    """

    name: str
    command: str
    folder: Path
    steps: int
    warmup: int
    rounds: int
    peers: Sequence[str]
    profile: bool
    started_at: float
    append_to: Path | None

    @property
    def num_steps(self) -> int:
        """Steps of each build: max_steps of the configuration."""
        return self.warmup + self.steps + self.profile


@dataclass(frozen=True)
class _System:
    """What is built and measured: xorl by a configuration, or a peer in its place."""

    name: str
    config: Config
    peer: Peer | None = None


@dataclass(frozen=True)
class _Measured:
    measurement: Measurement
    work: Work
    phases: dict[str, float]
    kernels: KernelSummary | None


def run_bench(loaded: LoadedConfig, options: BenchOptions, against: Mapping[str, LoadedConfig]) -> int:
    """Measure, and write the record in the main process. Collective. Returns an exit code.

    against: other configurations of xorl to measure in turn with it, by their names. Raises ValueError for a peer that
    is not known. A peer that is not installed, or runs out of memory, is recorded as such.
    """
    imported = time.time()
    is_main = runtime.global_rank() == 0
    set_up_logging("structured", is_main=is_main)
    config = loaded.config
    own = [_System(OWN, config), *(_System(f"{OWN} {name}", other.config) for name, other in against.items())]
    for system in own:
        if system.config.train.max_steps != options.num_steps:
            raise ValueError("train.max_steps: of a benchmark, --warmup and --steps set it")
    peers = [Peer.parse(name) for name in options.peers]
    architecture = read_architecture(config.model, config.train.load_weights_mode)
    absent = {peer.name: reason for peer in peers if (reason := peer.absence(config, architecture)) is not None}
    for name, reason in absent.items():
        logger.warning("peer=%s does not run: %s", name, reason)
    measured: list[_Measured] = []
    for round_, system in product(range(options.rounds), [*own, *(_System(peer.name, config, peer) for peer in peers)]):
        if system.name in absent:
            continue
        try:
            measured.append(_measure(system, options, round_))
        except torch.OutOfMemoryError as error:
            # With several ranks the others would wait for this one.
            if system.name == OWN or runtime.world_size() > 1:
                raise
            absent[system.name] = f"out of memory: {str(error).splitlines()[0]}"
            logger.warning("system=%s does not run: %s", system.name, absent[system.name])
            measured = [one for one in measured if one.measurement.system != system.name]
    if is_main:
        process_s = imported - options.started_at
        write_record(_record(config, options, measured, absent, process_s), options.folder, options.append_to)
    runtime.shutdown()
    return 0


def _record(
    config: Config, options: BenchOptions, measured: Sequence[_Measured], absent: Mapping[str, str], process_s: float
) -> Record:
    """The record of all measurements. process_s: from the command to when this process had imported everything."""
    first = measured[0]
    return Record(
        name=options.name,
        command=options.command,
        environment=environment(),
        work=first.work,
        config=config.model_dump(mode="json"),
        peers=settings_of_peers(config) if options.peers else None,
        start={
            "process": process_s,
            **first.phases,
            "first_step": first.measurement.steps[0]["time_s"] or 0.0,
        },
        warmup=options.warmup,
        steps=options.steps,
        measurements=[one.measurement for one in measured],
        absent=absent,
        kernels=next((one.kernels for one in measured if one.kernels is not None), None),
    )


class _Steps:
    """A sink that keeps what the observer reports."""

    def __init__(self) -> None:
        self.records: list[Metrics] = []

    def write(self, metrics: Metrics) -> None:
        self.records.append(metrics)

    def close(self) -> None:
        """Nothing to close."""


def _measure(system: _System, options: BenchOptions, round_: int) -> _Measured:
    """Build one system, train its steps and let it go; collective."""
    peer = system.peer
    own_folder = options.folder / "runs" / f"{re.sub('[^A-Za-z0-9.=_]+', '_', system.name)}_{round_ + 1}"
    config = _config_in(own_folder, system.config)
    logger.info("bench system=%r round=%d of %d", system.name, round_ + 1, options.rounds)
    _let_go()
    maker: AbstractContextManager[EngineMaker] = (
        nullcontext(build_engine_that_fits) if peer is None else peer.engine_maker()
    )
    is_profiled = options.profile and system.name == OWN and round_ == options.rounds - 1
    with maker as make_engine:
        return _train(build_run(config, make_engine=make_engine), config, options, system.name, is_profiled)


def _config_in(folder: Path, config: Config) -> Config:
    """The configuration of one build, which writes to `folder` and uploads nothing."""
    train_config = config.train.model_copy(update={"output_dir": str(folder)})
    # Not by an override: without an upload, the token that is for it would be refused as of no use.
    data_config = config.data.model_copy(update={"push_dataset_to_hub": None})
    return config.model_copy(update={"train": train_config, "data": data_config})


def _let_go() -> None:
    """Free what the build before left, on the device and in the compiler."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_initialized():  # if not, there is nothing yet, and asking would take the first GPU
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _train(run: Run, config: Config, options: BenchOptions, system: str, is_profiled: bool) -> _Measured:
    steps, kernels = _Steps(), list[KernelSummary]()
    run.observer.sinks.append(steps)
    run.checkpoints.due = _never
    profiler = Profiler(
        enabled=is_profiled and run.runtime.is_main,
        start_step=options.num_steps,
        end_step=options.num_steps + 1,
        trace_dir=options.folder,
        rank=run.runtime.rank,
        record_shapes=False,
        profile_memory=False,
        with_stack=False,
        receive=lambda recorded: kernels.append(summarise(recorded)),
    )
    try:
        # Half a measurement is none: a signal ends the whole benchmark, and there is nothing to save before.
        train(replace(run, eval_loader=None, profiler=profiler), saves_on_signal=False)
    finally:
        run.observer.close()
    measured_steps = steps.records[: options.warmup + options.steps]
    allocated_gib, reserved_gib = _peak_memory_gib(run.runtime.device)
    return _Measured(
        Measurement(system, measured_steps, allocated_gib, reserved_gib),
        _work_of(run, config, measured_steps),
        dict(run.phases.seconds),
        kernels[0] if kernels else None,
    )


def _never(step: int) -> bool:
    return False


def _peak_memory_gib(device: torch.device) -> tuple[float | None, float | None]:
    """The most that any rank's allocator gave out, and held; collective."""
    if device.type != "cuda":
        return None, None
    peaks = [torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)]
    most = torch.tensor(peaks, dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    allocated, reserved = most.tolist()
    return allocated / 2**30, reserved / 2**30


def _work_of(run: Run, config: Config, steps: Sequence[Metrics]) -> Work:
    tokens = [int(step["num_tokens"] or 0) for step in steps]
    return Work(
        architecture=run.architecture.spec.architecture,
        num_parameters=num_parameters(run.engine.model.module),
        num_ranks=run.runtime.world_size,
        tokens_per_step=sum(tokens) / len(tokens),
        bin_len=config.data.sample_packing_sequence_len,
        mean_document_len=run.mean_document_len,
        micro_batch_size=config.train.micro_batch_size,
        gradient_accumulation_steps=config.train.gradient_accumulation_steps,
    )
