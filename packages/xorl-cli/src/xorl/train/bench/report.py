"""Results of a benchmark: medians, quartiles and ratios, written as JSON and as a section of Markdown."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles

from xorl.config.fields import MODEL_PARALLEL_SIZES
from xorl.train.bench.kernel_summary import KernelSummary
from xorl.train.observe.observer import Metrics

logger = logging.getLogger(__name__)

PARTS = ("forward_s", "backward_s", "pipeline_s", "comm_s", "optimizer_s", "idle_s", "data_s")
SUMMARISED = ("tokens_per_s", "mfu", "time_s", *PARTS)


@dataclass(frozen=True)
class Workload:
    """The model and the data of a training step.

    tokens_per_step: over all ranks; a mean if bins are not filled completely. mean_document_len: None for streamed
    data, whose lengths are not known in advance.
    """

    architecture: str
    num_parameters: int
    num_ranks: int
    tokens_per_step: float
    bin_len: int
    mean_document_len: float | None
    micro_batch_size: int
    gradient_accumulation_steps: int


@dataclass(frozen=True)
class Measurement:
    """One round of one system: the metrics of its steps, including warm-up, and the peak memory over all ranks."""

    system: str
    steps: Sequence[Metrics]
    peak_allocated_gib: float | None
    peak_reserved_gib: float | None


@dataclass(frozen=True)
class Spread:
    """Median and quartiles over the measured steps of the counted rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class BenchRecord:
    """Everything that one command measured.

    config: that of xorl. peers: the settings of the peers, None without peers. start: seconds from the command to the
    end of the first step, by phase. absent: peers that did not run -> the reason.
    """

    name: str
    command: str
    environment: Mapping[str, str | int | None]
    work: Workload
    config: Mapping[str, object]
    peers: str | None
    start: Mapping[str, float | int]
    warmup: int
    steps: int
    measurements: Sequence[Measurement]
    absent: Mapping[str, str]
    kernels: KernelSummary | None

    @property
    def systems(self) -> tuple[str, ...]:
        """The systems that ran, in order; the first is xorl."""
        return tuple(dict.fromkeys(each.system for each in self.measurements))

    def of(self, system: str) -> list[Measurement]:
        """The rounds of one system."""
        return [each for each in self.measurements if each.system == system]

    @property
    def num_uncounted(self) -> int:
        """The number of initial rounds that count for peak memory only.

        Libraries load or compile kernels for each new number of tokens. If steps differ in that number, the warm-up
        does not cover all of them. Every round has the same steps, so the first of several rounds is left out.
        """
        first = self.of(self.systems[0])
        return int(len(first) > 1 and len({step["num_tokens"] for step in first[0].steps}) > 1)

    def counted(self, system: str) -> list[Measurement]:
        """The rounds of one system that the results are computed from."""
        return self.of(system)[self.num_uncounted :]

    def spreads(self, system: str) -> dict[str, Spread]:
        """Spread of each known metric over the measured steps of the counted rounds."""
        steps = [step for each in self.counted(system) for step in each.steps[self.warmup :]]
        found = {}
        for key in SUMMARISED:
            values = [value for step in steps if (value := step.get(key)) is not None]
            if values:
                low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
                found[key] = Spread(middle, low, high)
        return found

    def peak_gib(self, system: str) -> tuple[float | None, float | None]:
        """Peak memory (allocated, reserved) over all rounds."""
        rounds = self.of(system)
        allocated = [each.peak_allocated_gib for each in rounds if each.peak_allocated_gib is not None]
        reserved = [each.peak_reserved_gib for each in rounds if each.peak_reserved_gib is not None]
        return max(allocated, default=None), max(reserved, default=None)

    def ratios(self) -> dict[str, tuple[float, float, float]]:
        """For each other system: the ratio of xorl's median tokens/s to its own, and the lowest and highest by round.

        Clock rates drift, so the ratios by round compare measurements taken right after each other.
        """
        xorl, *others = self.systems
        found = {}
        for other in others:
            by_round = [
                self._median_rate([mine]) / self._median_rate([theirs])
                for mine, theirs in zip(self.counted(xorl), self.counted(other), strict=True)
            ]
            overall = self._median_rate(self.counted(xorl)) / self._median_rate(self.counted(other))
            found[other] = (overall, min(by_round), max(by_round))
        return found

    def _median_rate(self, rounds: Sequence[Measurement]) -> float:
        return median(float(step["tokens_per_s"] or 0.0) for each in rounds for step in each.steps[self.warmup :])


def write_record(record: BenchRecord, folder: Path, append_to: Path | None) -> None:
    """Write `bench.json` and `bench.md` to `folder`, log the Markdown, and append it to the file `append_to`."""
    text = to_markdown(record)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(to_json(record), indent=1) + "\n")
    (folder / "bench.md").write_text(text)
    if append_to is not None:
        before = append_to.read_text() if append_to.exists() else "# Measured\n"
        append_to.write_text(f"{before.rstrip()}\n\n{text}")
    logger.info("%s\nbench=%s", text.rstrip(), folder / "bench.json")


def to_json(record: BenchRecord) -> dict[str, object]:
    """The record with its derived results: the summary of each system, and the ratios."""
    systems = {
        system: {
            "summary": {key: asdict(spread) for key, spread in record.spreads(system).items()},
            "peak_allocated_gib": record.peak_gib(system)[0],
            "peak_reserved_gib": record.peak_gib(system)[1],
            "rounds": [list(each.steps) for each in record.of(system)],
        }
        for system in record.systems
    }
    ratios = {
        peer: {"ratio": ratio, "least": least, "greatest": greatest}
        for peer, (ratio, least, greatest) in record.ratios().items()
    }
    return {
        "name": record.name,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": record.command,
        "environment": dict(record.environment),
        "work": asdict(record.work),
        "warmup": record.warmup,
        "uncounted_rounds": record.num_uncounted,
        "steps": record.steps,
        "command_to_first_step_s": {**record.start, "total": sum(record.start.values())},
        "systems": systems,
        "ratios": ratios,
        "peers": record.peers,
        "absent": dict(record.absent),
        "kernels": None if record.kernels is None else asdict(record.kernels),
        "config": dict(record.config),
    }


def to_markdown(record: BenchRecord) -> str:
    """One section: command, machine and workload, a table of the systems, one of the parts of a step, and the start."""
    work = record.work
    num_rounds = len(record.of(record.systems[0]))
    rounds = "1 round" if num_rounds == 1 else f"{num_rounds} rounds"
    if record.num_uncounted:
        rounds += ", the first of which is not counted because its pack lengths are new to the libraries"
    length = work.mean_document_len
    documents = "streamed" if length is None else f"documents of {length:,.0f} tokens on average"
    known = [f"{name} {value}" for name, value in record.environment.items() if value is not None and name != "gpus"]
    spreads = {system: record.spreads(system) for system in record.systems}
    ranks = f"{work.num_ranks} rank{'' if work.num_ranks == 1 else 's'}"
    parts = [part for part in PARTS if any(part in found for found in spreads.values())]
    lines = [
        f"## {record.name}, {datetime.now(UTC).date().isoformat()}",
        "",
        f"    {record.command}",
        "",
        f"{record.environment['gpus'] or 'CPU'}; {', '.join(known)}.",
        f"{work.architecture}, {work.num_parameters / 1e9:.3g} B parameters, {ranks}, "
        f"{work.tokens_per_step:,.0f} tokens a step in bins of {work.bin_len:,}, {documents}; "
        f"{_settings(record)}. Medians of {record.steps} steps after "
        f"{record.warmup} of warm-up, in {rounds}, quartiles in brackets.",
        "",
        *_table(
            ("", "tokens/s", "MFU", "step ms", "peak GiB allocated", "reserved", "xorl is"),
            [_system_row(record, system) for system in record.systems],
        ),
        "",
        *_table(
            ("ms of a step", *(part.removesuffix("_s") for part in parts)),
            [
                (system, *(f"{1000 * found[part].median:.1f}" if part in found else "" for part in parts))
                for system, found in spreads.items()
            ],
        ),
        "",
        f"From the command to the end of the first step {sum(record.start.values()):.1f} s: "
        + ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in record.start.items())
        + ".",
    ]
    lines += [f"\n{peer} did not run: {reason}." for peer, reason in record.absent.items()]
    lines += [] if record.kernels is None else ["", *_kernels(record.kernels)]
    return "\n".join(lines) + "\n"


def _settings(record: BenchRecord) -> str:
    train, model, lora = (record.config[section] for section in ("train", "model", "lora"))
    assert isinstance(train, dict)
    assert isinstance(model, dict)
    assert isinstance(lora, dict)
    sizes = [key for key in (*MODEL_PARALLEL_SIZES, "expert_parallel_size") if train.get(key, 1) != 1]
    shown = ("optimizer", "param_dtype", "fp8", "enable_compile", "enable_gradient_checkpointing")
    settings = [f"{key} {str(train[key]).lower()}" for key in ("data_parallel_mode", *sizes, *shown) if key in train]
    settings.append(f"attention {model['attn_implementation']}")
    if lora["enable_lora"]:
        settings += [
            f"lora_rank {lora['lora_rank']}",
            f"lora_target_modules {lora['lora_target_modules'] or 'default'}",
        ]
    if lora["enable_qlora"]:
        settings.append(f"quant_format {lora['quant_format']}")
    return ", ".join(settings) + ("" if record.peers is None else f"; peers: {record.peers}")


def _system_row(record: BenchRecord, system: str) -> tuple[str, ...]:
    spreads, (allocated, reserved) = record.spreads(system), record.peak_gib(system)
    rate, step = spreads["tokens_per_s"], spreads["time_s"]
    ratio = record.ratios().get(system)
    return (
        system,
        f"{rate.median:,.0f} [{rate.low:,.0f}, {rate.high:,.0f}]",
        f"{spreads['mfu'].median:.1%}" if "mfu" in spreads else "",
        f"{1000 * step.median:.1f} [{1000 * step.low:.1f}, {1000 * step.high:.1f}]",
        "" if allocated is None else f"{allocated:.1f}",
        "" if reserved is None else f"{reserved:.1f}",
        "" if ratio is None else f"{ratio[0]:.3f} x [{ratio[1]:.3f}, {ratio[2]:.3f} by round]",
    )


def _kernels(kernels: KernelSummary) -> list[str]:
    unit = "kernels" if kernels.device == "cuda" else "operators"
    gaps = [(f"{gap.ms:.3f}", _short(gap.after), _short(gap.before)) for gap in kernels.gaps]
    return [
        f"One step under the profiler: {kernels.span_ms:.1f} ms, of which {kernels.busy_ms:.1f} with {unit} running.",
        "",
        *_table(
            (unit, "times", "ms", "share"),
            [
                (
                    _short(kernel.name),
                    str(kernel.count),
                    f"{kernel.total_ms:.2f}",
                    f"{kernel.total_ms / kernels.span_ms:.1%}",
                )
                for kernel in kernels.kernels
            ],
        ),
        *(["", *_table(("longest gaps, ms", "after", "before"), gaps)] if gaps else []),
    ]


def _short(name: str) -> str:
    name = name.replace("|", "/").replace("\n", " ")
    return name if len(name) <= 90 else f"{name[:87]}..."


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
