"""The learning-rate schedule."""

from __future__ import annotations

import math

import pytest

from xorl.core.optim import Schedule


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_warmup_rises_linearly_from_start_to_peak(style: str) -> None:
    # Catches a warm-up that starts one step late or never reaches the peak.
    schedule = Schedule(100, peak=1.0, minimum=0.1, start=0.5, warmup_ratio=0.1, style=style)
    assert [schedule(step) for step in (1, 5, 10)] == pytest.approx([0.55, 0.75, 1.0])


def test_decay_ends_at_minimum_where_the_decay_ratio_says() -> None:
    # Catches a decay that runs on past its span or counts its span from the wrong end.
    linear = Schedule(100, peak=1.0, minimum=0.1, decay_ratio=0.5, style="linear")
    assert [linear(step) for step in (25, 50, 51, 100)] == pytest.approx([0.55, 0.1, 0.1, 0.1])
    cosine = Schedule(100, peak=1.0, minimum=0.0, style="cosine")
    assert [cosine(step) for step in (50, 100)] == pytest.approx([0.5, 0.0])
    assert cosine(25) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


def test_constant_stays_at_peak_after_warmup() -> None:
    # Catches a constant schedule that decays to the minimum.
    schedule = Schedule(10, peak=3e-4, minimum=1e-7, warmup_ratio=0.2)
    assert [schedule(step) for step in range(2, 11)] == pytest.approx([3e-4] * 9)


def test_sample_spans_the_run() -> None:
    # Catches a printed schedule that leaves out the last step.
    steps = [step for step, _ in Schedule(1000, peak=1.0).sample(10)]
    assert (len(steps), steps[0], steps[-1]) == (10, 1, 1000)
    assert [step for step, _ in Schedule(3, peak=1.0).sample(10)] == [1, 2, 3]
