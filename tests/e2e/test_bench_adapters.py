"""The tool that times mixed adapters runs without a GPU too, on a tiny shape."""

import json

import bench_adapters


def test_one_adapter_and_banks_are_timed(tmp_path, capsys):
    """Catches a tool that fails for the first time on the GPU that was rented for it, or that leaves a kind out."""
    file = tmp_path / "adapters.json"
    assert bench_adapters.main(["--dry-run", "--adapters", "3", "--ranks", "4", "8", "--output", str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["ranks"] == [4, 8, 4]
    assert list(record["times"]) == ["one adapter", "bank of one", "bank of 3, mixed"]
    assert all(seconds > 0 for times in record["times"].values() for seconds in times)
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 3
