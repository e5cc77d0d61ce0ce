"""StepTimer: seconds by phase, and waits for collectives taken out of the phase in which they lie."""

from types import SimpleNamespace

import pytest
import torch

from xorl.train.observe import timing
from xorl.train.observe.timing import StepTimer


def test_a_wait_counts_as_communication_and_not_as_the_phase_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches waits that are counted twice, or in the phase after theirs, and gaps between calls that count as work.
    now = 0.0

    def pass_(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now))
    timer = StepTimer(torch.device("cpu"))
    for _ in range(2):  # two micro-batches
        timer.start()
        pass_(2)
        timer.begin_wait()
        pass_(3)
        timer.end_wait()
        timer.mark("forward")
        pass_(1)
        timer.begin_wait()
        pass_(5)
        timer.end_wait()
        timer.end_wait()  # as an engine does, whether or not replicas left one open
        timer.mark("backward")
        pass_(10)  # the caller's own
    timer.start()
    timer.mark("optimizer")
    assert timer.take().seconds(timer.clock) == {"forward": 4, "backward": 2, "comm": 16, "optimizer": 0}


def test_a_step_that_nobody_takes_is_forgotten() -> None:
    # Catches marks that pile up where an engine is driven without an observer, and waits of an evaluation.
    timer = StepTimer(torch.device("cpu"))
    for _ in range(3):
        timer.start()
        timer.mark("optimizer")
        timer.begin_wait()
        timer.end_wait()
    marks = timer.take()
    assert len(marks.ends) == 2
    assert marks.waits == []
