"""The tools that time parts run without a GPU too, on tiny shapes: not for the first time on one that was rented."""

import json

import pytest

import bench_adapters
import bench_attention
import bench_observation
import bench_worker


@pytest.fixture
def timed(tmp_path, capsys):
    """(tool, *options) -> its record, and the lines of its table."""

    def run(tool, *options):
        file = tmp_path / "timed.json"
        assert tool.main([*options, "--output", str(file)]) == 0
        table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
        return json.loads(file.read_text()), table

    return run


def test_one_adapter_and_banks_are_timed(timed):
    """Catches a tool that fails, or that leaves a kind out."""
    record, table = timed(bench_adapters, "--dry-run", "--adapters", "3", "--ranks", "4", "8")
    assert record["ranks"] == [4, 8, 4]
    assert list(record["times"]) == ["one adapter", "bank of one", "bank of 3, mixed"]
    assert all(seconds > 0 for times in record["times"].values() for seconds in times)
    assert len(table) == 2 + 3


def test_local_training_and_the_service_are_timed(timed):
    """Catches a tool that fails, or that leaves a kind out."""
    record, table = timed(bench_worker, "--dry-run", "--models", "3", "--rank", "4")
    single = ["local training", "service, 1 model"]
    assert list(record["tokens_per_s"]["full"]) == single
    assert list(record["tokens_per_s"]["lora"]) == [*single, "service, 3 models in turn", "service, 3 models mixed"]
    assert all(speed > 0 for kind in record["tokens_per_s"].values() for speeds in kind.values() for speed in speeds)
    assert len(table) == 2 + 2 + 4


def test_every_backend_is_timed_on_every_row(timed):
    """Catches a tool that fails, or that leaves a row out."""
    record, table = timed(bench_attention, "--tiny", "--rounds", "1", "--backends", "eager", "sdpa")
    rows = {(timing["case"], timing["backend"]) for timing in record["timings"]}
    assert rows == {(case, name) for case in bench_attention.cases(tiny=True) for name in ("eager", "sdpa")}
    assert all(timing["seconds"] > 0 and timing["tflops"] > 0 for timing in record["timings"])
    assert sum(timing["ratio"] is not None for timing in record["timings"]) == 2
    assert len(table) == 2 + len(rows)
    assert {line.count("|") for line in table} == {8}


def test_a_backend_that_is_not_known_stops_the_tool():
    """Catches a table that silently leaves out what was asked for."""
    with pytest.raises(ValueError, match="unknown attention backend 'fats'"):
        bench_attention.main(["--tiny", "--backends", "fats"])


def test_steps_are_timed_with_and_without_what_observes_them(capsys):
    """Catches a tool that fails."""
    assert bench_observation.main(["--dry-run"]) == 0
    table = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[0].strip() for row in table] == ["steps", "alone", "observed"]
    assert all(float(row[1]) > 0 for row in table[1:])
