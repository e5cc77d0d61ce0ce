"""The tool that times observation runs without a GPU too, on a tiny shape."""

import bench_observation


def test_steps_are_timed_with_and_without_what_observes_them(capsys):
    """Catches a tool that fails for the first time on the GPU that was rented for it."""
    assert bench_observation.main(["--dry-run"]) == 0
    table = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[0].strip() for row in table] == ["steps", "alone", "observed"]
    assert all(float(row[1]) > 0 for row in table[1:])
