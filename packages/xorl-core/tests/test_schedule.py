"""The learning-rate schedule."""

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
    assert [linear(step) for step in (1, 26, 50, 51, 100)] == pytest.approx([1.0, 0.55, 0.118, 0.1, 0.1])
    cosine = Schedule(100, peak=1.0, minimum=0.0, style="cosine")
    assert [cosine(step) for step in (1, 51)] == pytest.approx([1.0, 0.5])
    assert cosine(26) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


@pytest.mark.parametrize("style", ["linear", "cosine"])
@pytest.mark.parametrize(("num_steps", "warmup_ratio"), [(1, 0.0), (10, 0.0), (10, 0.3), (10, 0.9)])
def test_no_step_before_the_end_of_a_decay_to_zero_is_wasted(style: str, num_steps: int, warmup_ratio: float) -> None:
    # Catches a last step with a learning rate of 0, which computes a gradient and changes nothing.
    schedule = Schedule(num_steps, peak=1.0, minimum=0.0, warmup_ratio=warmup_ratio, style=style)
    assert all(schedule(step) > 0 for step in range(1, num_steps + 1))


def test_a_warmup_beyond_the_end_of_the_decay_is_refused() -> None:
    # Catches a learning rate that falls to the minimum the moment it has reached its peak.
    with pytest.raises(ValueError, match=r"warmup_ratio 0\.6 is above decay_ratio 0\.5"):
        Schedule(10, peak=1.0, warmup_ratio=0.6, decay_ratio=0.5, style="linear")
    Schedule(10, peak=1.0, warmup_ratio=0.6, decay_ratio=0.5, style="constant")


def test_constant_stays_at_peak_after_warmup() -> None:
    # Catches a constant schedule that decays to the minimum.
    schedule = Schedule(10, peak=3e-4, minimum=1e-7, warmup_ratio=0.2)
    assert [schedule(step) for step in range(2, 11)] == pytest.approx([3e-4] * 9)


def test_sample_spans_the_run() -> None:
    # Catches a printed schedule that leaves out the last step.
    steps = [step for step, _ in Schedule(1000, peak=1.0).sample(10)]
    assert (len(steps), steps[0], steps[-1]) == (10, 1, 1000)
    assert [step for step, _ in Schedule(3, peak=1.0).sample(10)] == [1, 2, 3]
