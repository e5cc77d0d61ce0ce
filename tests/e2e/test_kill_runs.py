"""The tool that kills runs finds nothing wrong with them in a few kills."""

from pathlib import Path

import pytest

from kill_runs import Layout, describe, kill_runs


@pytest.mark.multi
def test_killed_runs_end_like_the_one_that_was_not(tmp_path: Path) -> None:
    # Catches a moment of a save at which a kill loses a step or stops the same command from resuming.
    layouts = [Layout(1, save_async=False), Layout(2, save_async=True)]
    report = kill_runs(tmp_path / "runs", layouts, num_kills=6, seed=5)
    assert report.problems == []
    assert report.num_kills >= 6
    assert "0 runs differ" in describe(report, layouts, 5, 60.0)
