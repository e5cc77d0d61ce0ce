"""The tool that times the service's workers runs without a GPU too, on a tiny shape."""

import json

import bench_worker


def test_local_training_and_the_service_are_timed(tmp_path, capsys):
    """Catches a tool that fails for the first time on the GPU that was rented for it, or that leaves a kind out."""
    file = tmp_path / "worker.json"
    assert bench_worker.main(["--dry-run", "--models", "3", "--rank", "4", "--output", str(file)]) == 0
    record = json.loads(file.read_text())
    single = ["local training", "service, 1 model"]
    assert list(record["tokens_per_s"]["full"]) == single
    assert list(record["tokens_per_s"]["lora"]) == [*single, "service, 3 models in turn", "service, 3 models mixed"]
    assert all(speed > 0 for kind in record["tokens_per_s"].values() for speeds in kind.values() for speed in speeds)
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]) == 2 + 2 + 4
