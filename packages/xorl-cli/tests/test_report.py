"""The page of `xorl report`: what it says of runs, also of one that is still writing, and what it draws."""

import json
import math
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from xorl.cli.report import app
from xorl.config import config_from_mapping
from xorl.train.observe.run_file import RUN, write_run_file
from xorl.train.report.charts import MAX_POINTS, Line, line_chart, phase_chart, thinned
from xorl.train.report.page import report_page
from xorl.train.report.read import read_runs

NOW = datetime(2026, 1, 31, tzinfo=UTC)
MARKUP = "<img src=x onerror=alert(1)>"


def write_run(folder: Path, num_steps: int, **train: object) -> Path:
    """A folder as a run of 100 steps leaves it after `num_steps`, with evaluations every 10."""
    folder.mkdir(parents=True)
    options = {"output_dir": str(folder), "lr": 1e-3, **train}
    values = {"model": {"config_path": "m"}, "data": {"datasets": [{"path": MARKUP}]}, "train": options}
    write_run_file(folder, config_from_mapping(values).config, world_size=2, start_step=0, num_steps=100)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(num_steps + 1):
            if step % 10 == 0:
                file.write(json.dumps({"step": step, "eval_loss": 4 - step / 50, "eval_num_tokens": 9.0}) + "\n")
            if step:
                times = {"forward_s": 0.1, "backward_s": 0.2, "comm_s": 0.05, "optimizer_s": 0.1, "idle_s": 0.05}
                values = {"loss": 5 / step, "grad_norm": 1.0, "lr": 1e-3, "num_tokens": 100, "num_trained_tokens": 50}
                rest = {"tokens_per_s": 200.0, "peak_memory_gib": 1.5, "router_entropy": 0.7, "mfu": None}
                file.write(json.dumps({"step": step, **values, **rest, "time_s": 0.5, **times, "data_s": 0.01}) + "\n")
    counts = {"samples": 1200, "kept": 1100, "dropped": 100, "split": 0}
    part = {"datasets": [{"name": MARKUP, "counts": counts}], "num_bins": 40, "fill": 0.975}
    (folder / "data_receipt.json").write_text(json.dumps({"train": part}))
    return folder


def text_of(page: str) -> str:
    """The text of a page, a line for each row of a table."""
    body = page.split("<main>")[1].split("</main>")[0]
    return re.sub(r"<[^>]*>", " ", re.sub(r"</tr>|</h\d>|</p>|</figcaption>", "\n", body))


def rows_of(page: str) -> list[list[str]]:
    return [line.split("  ") for line in (re.sub(r"  +", "  ", line).strip() for line in text_of(page).splitlines())]


def test_two_runs_are_compared(tmp_path: Path) -> None:
    # Catches a page that lacks what a run has written, or says it of the other one.
    first, second = write_run(tmp_path / "first", 20), write_run(tmp_path / "second", 100, lr=2e-3)
    page = report_page(read_runs([first, second]), NOW)
    rows = rows_of(page)
    for row in (
        ["steps", "20 of 100", "100 of 100"],
        ["time", "10.0 s, about 40.0 s left", "50.0 s"],
        ["tokens", "2,000, 1,000 trained", "10,000, 5,000 trained"],
        ["loss", "5 \N{RIGHTWARDS ARROW} 0.25", "5 \N{RIGHTWARDS ARROW} 0.05"],
        ["held-out loss, lowest", "3.6 after step 20", "2 after step 100"],
        ["tokens/s, median", "200", "200"],
        ["ranks", "2", "2"],
        ["train.lr", "0.001", "0.002"],
        ["forward", "100.0 ms, 20.0%", "100.0 ms, 20.0%"],
        ["samples", "1,200"],
    ):
        assert row in rows, row
    assert "split" not in {row[0] for row in rows}  # a count of zero
    titles = re.findall(r"<figcaption>(.*?)(?: <span.*?)?</figcaption>", page)
    assert titles[:3] == ["Loss", "Gradient norm", "Learning rate"]
    # All that a run measures is drawn, even if this page does not know it.
    assert {"Held-out loss", "Peak memory", "router_entropy", "first", "second"} <= set(titles)
    assert "Model FLOP utilisation" not in titles
    differing = page.split("<h2>What differs</h2>")[1].split("</section>")[0]
    assert re.findall("<th>(.*?)</th>", differing) == ["", "first", "second", "train.lr", "train.output_dir"]
    assert MARKUP not in page


def test_a_run_that_is_still_writing_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    # Catches a page that cannot be made exactly while it is wanted.
    folder = write_run(tmp_path / "run", 7)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    (folder / "nonfinite.jsonl").write_text('{"step": 3, "reason": "loss nan", "bins": [4], "parameters": []}\n{"st')
    page = report_page(read_runs([folder]), NOW)
    assert ["steps", "7 of 100"] in rows_of(page)
    assert ["3", "loss nan", "4"] in rows_of(page)
    for name in ("metrics.jsonl", "data_receipt.json", "nonfinite.jsonl"):
        (folder / name).unlink()
    page = report_page(read_runs([folder]), NOW)
    assert ["steps", "0 of 100"] in rows_of(page)
    assert "<figure" not in page


def test_members_of_a_sweep_are_runs_of_their_own(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "sweep_run", 5)
    for name in ("large", "small"):
        member = folder / "sweep" / name
        member.mkdir(parents=True)
        (member / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert [run.name for run in read_runs([folder])] == ["sweep_run", "sweep_run/large", "sweep_run/small"]


def test_values_that_are_not_finite_are_marked_and_do_not_move_the_others() -> None:
    points = [(float(step), 2.0 + step % 2) for step in range(1, 11)]
    broken = [*points[:5], (6.0, math.nan), (7.0, math.inf), *points[7:]]
    chart = line_chart("Loss", "", [Line("run", 0, broken)])
    assert chart.count('class="lost"') == 2
    assert "nan" not in chart.lower()
    assert "inf" not in chart.lower()
    assert line_chart("Loss", "", [Line("run", 0, [(1.0, math.nan)])]) == ""


def test_a_long_run_is_drawn_with_few_points_that_have_its_means() -> None:
    points = [(float(step), float(step % 7)) for step in range(100_000)]
    few = thinned(points)
    assert len(few) <= MAX_POINTS
    assert sum(value for _, value in few) / len(few) == pytest.approx(3.0, abs=1e-3)
    assert few[0][0] == pytest.approx(few[1][0] - few[0][0], rel=0.6)
    assert thinned(points[:MAX_POINTS]) == points[:MAX_POINTS]
    # A single peak is in the range that is drawn around the means.
    peak = [(step, 1e3 if step == 777 else value + 1) for step, value in points]
    chart = line_chart("Gradient norm", "", [Line("run", 0, peak)])
    (around,) = re.findall(r'<polygon [^>]*? points="([^"]*)"', chart)
    assert min(float(pair.split(",")[1]) for pair in around.split()) == pytest.approx(8, abs=1)
    assert "logarithmic" in chart


def test_phases_are_stacked_and_one_slow_step_does_not_flatten_the_rest() -> None:
    # Catches areas that overlap, so that a phase looks longer than it is.
    steps = list(range(1, 201))
    slow = [100.0, *[1.0] * 199]
    chart = phase_chart("run", "s", steps, {"forward": slow, "backward": [2.0] * 200})
    corners = [
        [tuple(map(float, pair.split(","))) for pair in points.split()]
        for points in re.findall(r'<polygon [^>]*? points="([^"]*)"', chart)
    ]
    forward, backward = ({round(y) for x, y in area if x > 60} for area in corners)
    assert len(forward) == len(backward) == 2
    assert max(backward) == min(forward)  # pixels grow downwards
    assert max(forward) - min(forward) == pytest.approx((max(backward) - min(backward)) / 2, abs=1)


def test_the_command_writes_a_page_and_names_what_it_cannot_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 3)
    result = CliRunner().invoke(app, [str(folder)])
    assert (result.exit_code, result.stdout) == (0, f"{folder / 'report.html'}\n")
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, [str(folder), "--output", str(tmp_path / "file" / "page.html")])
    assert result.exit_code == 2
    assert "page.html cannot be written (Not a directory); name another file" in result.stderr
    (folder / RUN).write_text("{")
    for paths, problem in (
        ([tmp_path], "is not the train.output_dir of a run: it has no metrics.jsonl"),
        ([tmp_path / "none"], "it is not a folder"),
        ([folder, folder], "is given twice"),
        ([folder], f"PATH: {folder / RUN}:1 is not JSON"),
    ):
        result = CliRunner().invoke(app, list(map(str, paths)))
        assert (result.exit_code, problem in result.stderr) == (2, True), result.stderr
    result = CliRunner().invoke(app, [str(write_run(tmp_path / "other", 1)), "--output", str(tmp_path / "no" / "page")])
    assert "--output: " in result.stderr
