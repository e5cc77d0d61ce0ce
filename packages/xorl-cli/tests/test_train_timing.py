"""StepTimer: seconds by phase, and waits for collectives taken out of the phase in which they lie."""

from __future__ import annotations

import time

import pytest
import torch

from xorl.train.timing import StepTimer


def test_a_wait_counts_as_communication_and_not_as_the_phase_around_it() -> None:
    # Catches waits that are counted twice, or in the phase after theirs, and gaps between calls that count as work.
    timer = StepTimer(torch.device("cpu"))
    for _ in range(2):  # two micro-batches
        timer.start()
        time.sleep(0.02)
        timer.begin_wait()
        time.sleep(0.03)
        timer.end_wait()
        timer.mark("forward")
        time.sleep(0.01)
        timer.begin_wait()
        time.sleep(0.05)
        timer.end_wait()
        timer.end_wait()  # as an engine does, whether or not replicas left one open
        timer.mark("backward")
        time.sleep(0.1)  # the caller's own
    timer.start()
    timer.mark("optimizer")
    spent = timer.take().seconds(timer.clock)
    expected = {"forward": 0.04, "backward": 0.02, "comm": 0.16, "optimizer": 0.0}
    assert spent == pytest.approx(expected, abs=0.02)


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
