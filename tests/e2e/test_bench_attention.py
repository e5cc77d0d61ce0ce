"""The tool that times attention runs without a GPU too, on small rows."""

import json

import pytest

import bench_attention


def test_every_backend_is_timed_on_every_row(tmp_path, capsys):
    """Catches a tool that fails for the first time on the GPU that was rented for it, or that leaves a row out."""
    file = tmp_path / "attention.json"
    options = ["--tiny", "--rounds", "1", "--backends", "eager", "sdpa", "--output", str(file)]
    assert bench_attention.main(options) == 0
    record = json.loads(file.read_text())
    rows = {(timing["case"], timing["backend"]) for timing in record["timings"]}
    assert rows == {(case, name) for case in bench_attention.cases(tiny=True) for name in ("eager", "sdpa")}
    assert all(timing["seconds"] > 0 and timing["tflops"] > 0 for timing in record["timings"])
    assert sum(timing["ratio"] is not None for timing in record["timings"]) == 2
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(rows)
    assert {line.count("|") for line in table} == {8}


def test_a_backend_that_is_not_known_stops_the_tool():
    """Catches a table that silently leaves out what was asked for."""
    with pytest.raises(ValueError, match="unknown attention backend 'fats'"):
        bench_attention.main(["--tiny", "--backends", "fats"])
