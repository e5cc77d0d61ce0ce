"""run_bench: trains a few steps with xorl and with other trainers in turn, and records their speed.

The measured run is built as `xorl train` builds it, with the same loop and observer. A peer only replaces the engine
(peers.py), so all systems read the same batches, follow the same schedule and are timed by the same code.
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
from xorl.data.stream import Stream
from xorl.lora.quantized import num_parameters
from xorl.train.bench.environment import environment
from xorl.train.bench.kernel_summary import KernelSummary, summarise
from xorl.train.bench.memory import build_engine_if_it_fits
from xorl.train.bench.peers import Peer, peer_settings
from xorl.train.bench.report import BenchRecord, Measurement, Workload, write_record
from xorl.train.build import EngineMaker, build_run
from xorl.train.loop import Run, train
from xorl.train.model import sketch_model
from xorl.train.model_source import read_architecture
from xorl.train.observe.observer import Metrics
from xorl.train.observe.profile import Profiler
from xorl.train.observe.progress import set_up_logging

logger = logging.getLogger(__name__)

XORL = "xorl"


@dataclass(frozen=True)
class BenchOptions:
    """The measurements to take.

    xorl and the peers run in turn, `rounds` times each. The first `warmup` steps of a round are not measured, and the
    first of several rounds does not count if packed rows differ in length (report.py). profile: record one more step in
    the last round of xorl. started_at: the time of the command, in seconds since the epoch. append_to: a Markdown file
    to append the record to.
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
        """Steps of each round, which the configuration must have as train.max_steps."""
        return self.warmup + self.steps + self.profile


@dataclass(frozen=True)
class _System:
    """A system to measure: xorl with one configuration, or a peer."""

    name: str
    config: Config
    peer: Peer | None = None


@dataclass(frozen=True)
class _RoundResult:
    measurement: Measurement
    work: Workload
    phases: dict[str, float]
    kernels: KernelSummary | None


def run_bench(loaded: LoadedConfig, options: BenchOptions, against: Mapping[str, LoadedConfig]) -> int:
    """Measure all systems and write the record on the main rank. Collective. Returns an exit code.

    against: other configurations of xorl to compare with, by name. Peers that are not installed or run out of memory
    are recorded as absent. Raises ValueError for an unknown peer.
    """
    imported = time.time()
    is_main = runtime.global_rank() == 0
    set_up_logging("structured", "INFO", is_main=is_main)
    if is_main and (line := loaded.without_effect_line()) is not None:
        logger.warning("%s", line)
    config = loaded.config
    variants = [_System(XORL, config), *(_System(f"{XORL} {name}", other.config) for name, other in against.items())]
    for system in variants:
        if system.config.train.max_steps != options.num_steps:
            raise ValueError("train.max_steps: in a benchmark it follows from --warmup and --steps; remove the option")
    peers = [Peer.parse(name) for name in options.peers]
    architecture = read_architecture(config.model, config.train.load_weights_mode, config.lora.adapter_path)
    absent = {
        peer.name: reason for peer in peers if (reason := peer.unavailable_reason(config, architecture)) is not None
    }
    for name, reason in absent.items():
        logger.warning("peer=%s does not run: %s", name, reason)
    results: list[_RoundResult] = []
    for round_, system in product(
        range(options.rounds), [*variants, *(_System(peer.name, config, peer) for peer in peers)]
    ):
        if system.name in absent:
            continue
        try:
            results.append(_measure(system, options, round_))
        except torch.OutOfMemoryError as error:
            # With several ranks, the others would hang in a collective.
            if system.name == XORL or runtime.world_size() > 1:
                raise
            absent[system.name] = f"out of memory: {str(error).splitlines()[0]}"
            logger.warning("system=%s does not run: %s", system.name, absent[system.name])
            results = [result for result in results if result.measurement.system != system.name]
    if is_main:
        process_s = imported - options.started_at
        write_record(_record(config, options, results, absent, process_s), options.folder, options.append_to)
    runtime.shutdown()
    return 0


def _record(
    config: Config, options: BenchOptions, results: Sequence[_RoundResult], absent: Mapping[str, str], process_s: float
) -> BenchRecord:
    """The record of all rounds. process_s: seconds from the command to the end of this process's imports."""
    first = results[0]
    return BenchRecord(
        name=options.name,
        command=options.command,
        environment=environment(),
        work=first.work,
        config=config.model_dump(mode="json"),
        peers=peer_settings(config) if options.peers else None,
        start={
            "process": process_s,
            **first.phases,
            "first_step": first.measurement.steps[0]["time_s"] or 0.0,
        },
        warmup=options.warmup,
        steps=options.steps,
        measurements=[result.measurement for result in results],
        absent=absent,
        kernels=next((result.kernels for result in results if result.kernels is not None), None),
    )


class _StepRecorder:
    """A sink that keeps the metrics of every step."""

    def __init__(self) -> None:
        self.records: list[Metrics] = []

    def write(self, metrics: Metrics) -> None:
        self.records.append(metrics)

    def close(self) -> None: ...


def _measure(system: _System, options: BenchOptions, round_: int) -> _RoundResult:
    """Build one system and train its steps; collective."""
    peer = system.peer
    folder = options.folder / "runs" / f"{re.sub('[^A-Za-z0-9.=_]+', '_', system.name)}_{round_ + 1}"
    config = _config_in(folder, system.config)
    logger.info("bench system=%r round=%d of %d", system.name, round_ + 1, options.rounds)
    _free_memory()
    maker: AbstractContextManager[EngineMaker] = (
        nullcontext(build_engine_if_it_fits) if peer is None else peer.engine_maker()
    )
    is_profiled = options.profile and system.name == XORL and round_ == options.rounds - 1
    with maker as make_engine:
        return _train(build_run(config, make_engine=make_engine), config, options, system.name, is_profiled)


def _config_in(folder: Path, config: Config) -> Config:
    """The configuration of one round, which writes to `folder` and uploads nothing."""
    train_config = config.train.model_copy(update={"output_dir": str(folder)})
    # Not an override: validation would then reject the upload token as unused.
    data_config = config.data.model_copy(update={"push_dataset_to_hub": None})
    return config.model_copy(update={"train": train_config, "data": data_config})


def _free_memory() -> None:
    """Free what the previous round left on the device and in the compiler's caches."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_initialized():  # otherwise nothing is allocated, and the call would initialise the first GPU
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _train(run: Run, config: Config, options: BenchOptions, system: str, is_profiled: bool) -> _RoundResult:
    recorder, kernels = _StepRecorder(), list[KernelSummary]()
    run.observer.sinks.append(recorder)
    run.checkpoints.due = lambda step: False
    profiler = Profiler(
        enabled=is_profiled and run.startup.runtime.is_main,
        start_step=options.num_steps,
        end_step=options.num_steps + 1,
        trace_dir=options.folder,
        rank=run.startup.runtime.rank,
        record_shapes=False,
        profile_memory=False,
        with_stack=False,
        receive=lambda recorded: kernels.append(summarise(recorded)),
    )
    try:
        # A partial measurement is useless: a signal ends the whole benchmark, and nothing needs to be saved first.
        train(replace(run, evaluation=None, profiler=profiler), saves_on_signal=False)
    finally:
        run.observer.close()
    steps = recorder.records[: options.warmup + options.steps]
    allocated_gib, reserved_gib = _peak_memory_gib(run.startup.runtime.device)
    return _RoundResult(
        Measurement(system, steps, allocated_gib, reserved_gib),
        _workload(run, config, steps),
        dict(run.startup.phases.seconds),
        kernels[0] if kernels else None,
    )


def _peak_memory_gib(device: torch.device) -> tuple[float | None, float | None]:
    """Peak memory (allocated, reserved) of any rank's allocator; collective."""
    if device.type != "cuda":
        return None, None
    peaks = [torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)]
    most = torch.tensor(peaks, dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    allocated, reserved = most.tolist()
    return allocated / 2**30, reserved / 2**30


def _workload(run: Run, config: Config, steps: Sequence[Metrics]) -> Workload:
    tokens = [int(step["num_tokens"] or 0) for step in steps]
    data, architecture = run.startup.longest.data.train, run.startup.architecture
    return Workload(
        architecture=architecture.spec.architecture,
        num_parameters=num_parameters(sketch_model(architecture, config.model, config.train, config.lora)),
        num_ranks=run.startup.runtime.world_size,
        tokens_per_step=sum(tokens) / len(tokens),
        bin_len=config.data.sample_packing_sequence_len,
        mean_document_len=None if isinstance(data, Stream) else float(data.documents.lengths.mean()),
        micro_batch_size=config.train.micro_batch_size,
        gradient_accumulation_steps=config.train.gradient_accumulation_steps,
    )
