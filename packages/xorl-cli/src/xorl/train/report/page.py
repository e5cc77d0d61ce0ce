"""One self-contained page about runs: their results, charts of their metrics, their data and their options."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from html import escape
from pathlib import Path
from statistics import median
from typing import NamedTuple, cast

from xorl.ckpt.layout import JSON
from xorl.config.options import all_options, documented_path, yaml_text
from xorl.train.report.charts import NUM_COLOURS, Line, line_chart, number, phase_chart
from xorl.train.report.read import Object, RunRecord

_TEMPLATE = Path(__file__).with_name("page.html")
# The parts of a step's time, in the order in which they are stacked; together they are time_s.
PHASES = ("forward_s", "backward_s", "pipeline_s", "optimizer_s", "comm_s", "idle_s")
# Times of the host beside those of a step.
_HOST_TIMES = ("data_s", "checkpoint_s")
# The facts about machine and software that are shown, by their names in run.json.
_ENVIRONMENT = {"gpus": "GPUs", "cpu_cores": "CPU cores", "xorl": "xorl", "commit": "commit", "torch": "torch"}
# How many steps that are not finite, and bins or parameters of one, are listed.
_MAX_LISTED = 20


class _Chart(NamedTuple):
    key: str
    title: str
    unit: str = ""
    smooth: bool = False
    may_be_log: bool = True


_CHARTS = (
    _Chart("loss", "Loss", "mean per trained token, or per pair of answers", smooth=True),
    _Chart("grad_norm", "Gradient norm", smooth=True),
    _Chart("lr", "Learning rate", may_be_log=False),
    _Chart("tokens_per_s", "Speed", "tokens/s", smooth=True),
    _Chart("mfu", "Model FLOP utilisation", "share of the peak rate", smooth=True),
    _Chart("peak_memory_gib", "Peak memory", "GiB, of the reporting process"),
    _Chart("time_s", "Time of a step", "s", smooth=True),
    _Chart("data_s", "Wait for data", "s, of the host", smooth=True),
)
_EVALUATIONS = (
    _Chart("eval_loss", "Held-out loss", "mean per trained token, or per pair of answers"),
    _Chart("eval_token_accuracy", "Held-out tokens right", "share"),
    _Chart("eval_accuracy", "Held-out answers right", "share of documents"),
)
_NOT_DRAWN = {"step", "eval_num_tokens", "eval_num_pairs", *PHASES, *_HOST_TIMES}


def report_page(runs: Sequence[RunRecord], now: datetime) -> str:
    """The page as HTML, without any other files."""
    title = ", ".join(run.name for run in runs[:3]) + ", ..." * (len(runs) > 3)
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">as of {now:%Y-%m-%d %H:%M:%S}</p>',
        _legend(runs),
        _section("Results", _table(["", *_names(runs)], _results(runs, now))),
        _section("What differs", _differences(runs)),
        _section("Training", _charts(runs, _CHARTS)),
        _section("Evaluation", _charts(runs, _EVALUATIONS, marks=True)),
        _section("Phases of a step", _phases(runs)),
        _section("Other metrics", _charts(runs, _other_charts(runs))),
        _section("Steps that were not finite", _nonfinite(runs)),
        _section("Data", "".join(map(_receipt, runs))),
        _section("Configuration", _options(runs)),
    ]
    colours = [f"  .c{index} {{ stroke: var(--c{index}); }}" for index in range(NUM_COLOURS)]
    colours += [
        f"  circle.c{index}, polygon.c{index}, .p{index} {{ fill: var(--c{index}); }}" for index in range(NUM_COLOURS)
    ]
    page = _TEMPLATE.read_text(encoding="utf-8")
    for mark, text in (("title", escape(title)), ("colours", "\n".join(colours)), ("body", "\n".join(body))):
        page = page.replace(f"{{{{{mark}}}}}", text, 1)
    return page


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _names(runs: Sequence[RunRecord]) -> list[str]:
    return [run.name for run in runs]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts; the first of a row is its heading. Empty without rows."""
    if not rows:
        return ""
    top = "".join(f"<th>{escape(text)}</th>" for text in head)
    lines = [
        f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(text)}</td>' for text in row[1:])}</tr>" for row in rows
    ]
    return f'<div class="card scroll"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _colour_names(names: Sequence[str]) -> str:
    marks = (
        f'<span><i style="background:var(--c{index % NUM_COLOURS})"></i>{escape(name)}</span>'
        for index, name in enumerate(names)
    )
    return f'<div class="legend">{"".join(marks)}</div>'


def _legend(runs: Sequence[RunRecord]) -> str:
    return _colour_names(_names(runs)) if len(runs) > 1 else ""


# Results


def _results(runs: Sequence[RunRecord], now: datetime) -> list[list[str]]:
    """The rows that any run has a value for."""
    makers: dict[str, Callable[[RunRecord], str]] = {
        "steps": _progress,
        "written": lambda run: _written(run, now),
        "time": _time,
        "tokens": _tokens,
        "loss": lambda run: _first_last(run, "loss"),
        "held-out loss": lambda run: _first_last(run, "eval_loss"),
        "held-out loss, lowest": _lowest,
        "held-out tokens right": lambda run: _first_last(run, "eval_token_accuracy"),
        "held-out answers right": lambda run: _first_last(run, "eval_accuracy"),
        "tokens/s, median": lambda run: _median(run, "tokens_per_s"),
        "MFU, median": lambda run: _median(run, "mfu"),
        "peak memory, GiB": lambda run: _largest(run, "peak_memory_gib"),
        "steps not finite": lambda run: str(len(run.nonfinite) or ""),
        "checkpoints": _checkpoints,
        "ranks": lambda run: str(run.about.get("world_size", "")),
        **{shown: _environment(name) for name, shown in _ENVIRONMENT.items()},
        "began": lambda run: str(run.about.get("started", "")),
    }
    rows = [[name, *(maker(run) for run in runs)] for name, maker in makers.items()]
    return [row for row in rows if any(row[1:])]


def _progress(run: RunRecord) -> str:
    last, total = (run.steps[-1]["step"] if run.steps else 0), run.about.get("num_steps")
    return f"{last} of {total}" if total is not None else str(last)


def _written(run: RunRecord, now: datetime) -> str:
    if run.written is None:
        return "nothing yet"
    written = datetime.fromtimestamp(run.written).astimezone()
    return f"{written:%Y-%m-%d %H:%M:%S}, {_duration((now - written).total_seconds())} before this page"


def _time(run: RunRecord) -> str:
    times = [value for _, value in run.values("time_s")]
    if not times:
        return ""
    text, total = _duration(sum(times)), run.about.get("num_steps")
    left = (total if isinstance(total, int) else 0) - int(run.steps[-1]["step"] or 0)
    # The first step compiles kernels.
    return f"{text}, about {_duration(left * median(times[1:] or times))} left" if left > 0 else text


def _tokens(run: RunRecord) -> str:
    tokens, trained = (sum(value for _, value in run.values(key)) for key in ("num_tokens", "num_trained_tokens"))
    return f"{tokens:,.0f}, {trained:,.0f} trained" if tokens else ""


def _first_last(run: RunRecord, key: str) -> str:
    values = run.values(key)
    return f"{number(values[0][1])} \N{RIGHTWARDS ARROW} {number(values[-1][1])}" if values else ""


def _lowest(run: RunRecord) -> str:
    values = [(value, step) for step, value in run.values("eval_loss") if math.isfinite(value)]
    return f"{number(min(values)[0])} after step {min(values)[1]}" if values else ""


def _median(run: RunRecord, key: str) -> str:
    values = [value for _, value in run.values(key)]
    return number(median(values[1:] or values)) if values else ""


def _largest(run: RunRecord, key: str) -> str:
    values = [value for _, value in run.values(key)]
    return number(max(values)) if values else ""


def _checkpoints(run: RunRecord) -> str:
    return f"{len(run.checkpoints)}, newest {run.checkpoints[-1]}" if run.checkpoints else ""


def _environment(name: str) -> Callable[[RunRecord], str]:
    def maker(run: RunRecord) -> str:
        found = run.about.get("environment")
        return str(found.get(name, "")) if isinstance(found, Mapping) else ""

    return maker


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if 0 <= seconds < 60 else str(timedelta(seconds=round(max(seconds, 0))))


# Charts


def _charts(runs: Sequence[RunRecord], charts: Sequence[_Chart], *, marks: bool = False) -> str:
    drawn = []
    for chart in charts:
        values = [(index, run.name, run.values(chart.key)) for index, run in enumerate(runs)]
        lines = [Line(name, index, [(float(step), value) for step, value in points]) for index, name, points in values]
        drawn.append(
            line_chart(chart.title, chart.unit, lines, smooth=chart.smooth, marks=marks, may_be_log=chart.may_be_log)
        )
    content = "".join(drawn)
    return f'{_legend(runs)}<div class="charts">{content}</div>' if content else ""


def _other_charts(runs: Sequence[RunRecord]) -> list[_Chart]:
    """Charts of all metrics that no other section shows, such as those of routers."""
    shown = _NOT_DRAWN | {chart.key for chart in (*_CHARTS, *_EVALUATIONS)}
    records = (record for run in runs for record in (*run.steps, *run.evaluations))
    keys = dict.fromkeys(key for record in records for key in record if key not in shown)
    return [_Chart(key, key) for key in keys]


def _phases(runs: Sequence[RunRecord]) -> str:
    """How long the phases take on average, as a table, and how that changes, as a chart for each run."""
    timed = [(run, records) for run in runs if (records := [each for each in run.steps if each.get("time_s")])]
    found = [key for key in PHASES if any(key in record for _, records in timed for record in records)]
    if not found:
        return ""
    rows = [[_phase(key), *(_mean_share(records, key) for _, records in timed)] for key in (*found, *_HOST_TIMES)]
    charts = []
    for run, records in timed:
        steps = [int(record["step"] or 0) for record in records]
        phases = {_phase(key): [float(record.get(key) or 0.0) for record in records] for key in found}
        charts.append(phase_chart(run.name, "s of a step", steps, phases))
    note = (
        "Means without the first step. The wait for data may overlap with the step before, and saving checkpoints is "
        "not part of a step's time."
    )
    return (
        f"{_table(['', *_names([run for run, _ in timed])], rows)}"
        f'<p class="muted">{note}</p>{_colour_names([_phase(key) for key in found])}'
        f'<div class="charts">{"".join(charts)}</div>'
    )


def _phase(key: str) -> str:
    named = {"comm_s": "waiting for other ranks", "idle_s": "idle", "data_s": "wait for data"}
    return named.get(key, "saving checkpoints" if key == "checkpoint_s" else key.removesuffix("_s"))


def _mean_share(records: Sequence[Mapping[str, float | int | None]], key: str) -> str:
    later = records[1:] or records
    mean = sum(float(record.get(key) or 0.0) for record in later) / len(later)
    whole = sum(float(record["time_s"] or 0.0) for record in later) / len(later)
    return f"{mean * 1e3:,.1f} ms, {mean / whole:.1%}"


def _nonfinite(runs: Sequence[RunRecord]) -> str:
    tables = []
    for run in runs:
        rows = [
            [
                str(record.get("step")),
                str(record.get("reason")),
                _some(record.get("bins")),
                _some(record.get("parameters")),
            ]
            for record in run.nonfinite[:_MAX_LISTED]
        ]
        if more := len(run.nonfinite) - len(rows):
            rows.append([f"{more} more", "", "", ""])
        if rows:
            head = ["step", "reason", "bins", "parameters"]
            tables.append(f'<h3 class="bad">{escape(run.name)}</h3>{_table(head, rows)}')
    return "".join(tables)


def _some(values: JSON) -> str:
    items = [str(value) for value in cast("Sequence[JSON]", values)] if isinstance(values, list) else []
    more = [f"and {len(items) - _MAX_LISTED} more"] * (len(items) > _MAX_LISTED)
    return ", ".join([*items[:_MAX_LISTED], *more])


# Data and options


def _receipt(run: RunRecord) -> str:
    """Counts of samples kept, cut and dropped, with a column for each training and held-out dataset."""
    columns: list[tuple[str, Object]] = []
    facts: list[str] = []
    for part, receipt in run.receipt.items():
        if not isinstance(receipt, Mapping):
            continue
        label = part.replace("_", " ")
        for dataset in cast("Sequence[Object]", receipt.get("datasets", ())):
            columns.append((f"{label}: {dataset.get('name')}", cast(Object, dataset.get("counts", {}))))
        if (fill := receipt.get("fill")) is not None:
            facts.append(f"{label}: {receipt.get('num_bins'):,} bins, {cast(float, fill):.1%} full")
    names = dict.fromkeys(name for _, counts in columns for name in counts)
    rows = [
        [name.replace("_", " "), *(f"{cast(int, counts.get(name, 0)):,}" for _, counts in columns)]
        for name in names
        if any(counts.get(name) for _, counts in columns)
    ]
    if not rows:
        return ""
    shown = f'<p class="muted">{escape("; ".join(facts))}</p>' if facts else ""
    return f"<h3>{escape(run.name)}</h3>{_table(['', *(name for name, _ in columns)], rows)}{shown}"


def _differences(runs: Sequence[RunRecord]) -> str:
    """The options that are not the same in all runs."""
    names, rows = _options_of(runs)
    return _table(["", *names], [row for row in rows if len(set(row[1:])) > 1])


def _options(runs: Sequence[RunRecord]) -> str:
    """The options with other values than the defaults, and all options."""
    names, rows = _options_of(runs)
    if not rows:
        return ""
    defaults = {path: option.default for path, option in all_options().items()}
    changed = [row for row in rows if set(row[1:]) != {defaults.get(documented_path(row[0]))}]
    return (
        f"<p>Other than the defaults:</p>{_table(['', *names], changed)}"
        f"<details><summary>All options</summary>{_table(['', *names], rows)}</details>"
    )


def _options_of(runs: Sequence[RunRecord]) -> tuple[list[str], list[list[str]]]:
    """The names of the runs whose options are known, and rows of an option's path and its value in each of them."""
    known = {run.name: dict(_flat("", run.about["options"])) for run in runs if "options" in run.about}
    paths = dict.fromkeys(path for options in known.values() for path in options)
    return list(known), [[path, *(options.get(path, "") for options in known.values())] for path in paths]


def _flat(path: str, value: JSON) -> list[tuple[str, str]]:
    """The options below `path` as (path, YAML text); entries of lists of mappings are numbered."""
    if isinstance(value, Mapping) and (value or not path):
        return [item for key, each in value.items() for item in _flat(f"{path}.{key}" if path else key, each)]
    if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        return [item for index, each in enumerate(value) for item in _flat(f"{path}.{index}", each)]
    return [(path, yaml_text(value))]
