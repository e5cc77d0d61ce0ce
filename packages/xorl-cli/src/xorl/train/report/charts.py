"""Charts as inline SVG: lines over the steps of runs, and stacked phases of the steps of one run.

The colours are CSS variables of the page, by number; its script reads `data-values` to show the values under the
pointer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import NamedTuple

Point = tuple[float, float]

NUM_COLOURS = 8
# Finer than the charts show, and little enough that a page with a dozen charts opens at once.
MAX_POINTS = 400
# More marks than this would hide their line.
_MAX_MARKS = 60
# A smoothed line is the mean over this share of the points.
_SMOOTHED = 25
# Values that span more than this are drawn on a logarithmic scale.
_LOG_RATIO = 50.0
_WIDTH, _HEIGHT = 480, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 8, 20


@dataclass(frozen=True)
class Line:
    """A metric of one run: its values by step, and the number of the run's colour."""

    name: str
    colour: int
    points: Sequence[Point]


class _Scale(NamedTuple):
    """Maps values from `low` to `high` to pixels from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(each) if self.is_log else each for each in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.stop - self.start)


def line_chart(
    title: str, unit: str, lines: Sequence[Line], *, smooth: bool = False, marks: bool = False, may_be_log: bool = True
) -> str:
    """A chart of lines. smooth: draw the values faintly, and a moving mean over them. marks: also mark single points.

    Of lines with more than MAX_POINTS values, the means of neighbours are drawn, and faintly their range.

    may_be_log: whether a logarithmic scale is used if the values span more than a factor of 50.
    Values that are not finite are left out, with a mark below for each.
    """
    finite = {line.name: [point for point in line.points if math.isfinite(point[1])] for line in lines}
    values = [value for points in finite.values() for _, value in points]
    if not values:
        return ""
    steps = [step for line in lines for step, _ in line.points]
    across, up = _axes(min(steps), max(steps), values, may_be_log=may_be_log)
    drawn = []
    for line in lines:
        groups = _groups(finite[line.name])
        points = list(map(_mean, groups))
        window = len(points) // _SMOOTHED if smooth else 0
        place = [(across(step), up(value)) for step, value in points]
        colour = f'class="c{line.colour % NUM_COLOURS}"'
        values_of = f'data-name="{escape(line.name)}" data-values="{_values(points)}"'
        faint = ' opacity=".3"' if window > 1 else ""
        if len(points) < len(finite[line.name]):
            ranges = [(step, [value for _, value in group]) for (step, _), group in zip(points, groups, strict=True)]
            above = [(across(step), up(max(values))) for step, values in ranges]
            below = [(across(step), up(min(values))) for step, values in ranges]
            drawn.append(f'<polygon {colour} opacity=".2" points="{_pairs([*above, *reversed(below)])}"/>')
        drawn.append(f'<polyline {colour}{faint} {values_of} points="{_pairs(place)}"/>')
        if window > 1:
            smoothed = [(across(step), up(value)) for step, value in _moving_mean(points, window)]
            drawn.append(f'<polyline {colour} points="{_pairs(smoothed)}"/>')
        if (marks and len(place) <= _MAX_MARKS) or len(place) == 1:
            drawn += [f'<circle {colour} cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in place]
        lost = [across(step) for step, value in line.points if not math.isfinite(value)]
        drawn += [f'<path class="lost" d="M{x:.1f} {_HEIGHT - _BOTTOM}v-8"/>' for x in lost[:MAX_POINTS]]
    caption = f"{unit}, logarithmic".removeprefix(", ") if up.is_log else unit
    return _figure(title, caption, across, up, drawn)


def phase_chart(title: str, unit: str, steps: Sequence[int], phases: Mapping[str, Sequence[float]]) -> str:
    """The phases of each step, stacked in their order; all have a value for each of `steps`."""
    if not steps:
        return ""
    below = [(float(step), 0.0) for step in steps]
    stacked: list[tuple[str, Sequence[Point], Sequence[Point], Sequence[Point]]] = []
    for name, values in phases.items():
        top = [(step, base + value) for (step, base), value in zip(below, values, strict=True)]
        own = [(step, value) for (step, _), value in zip(below, values, strict=True)]
        stacked.append((name, thinned(below), thinned(top), thinned(own)))
        below = top
    # One slow step, such as the first, must not flatten all others.
    tallest = sorted(value for _, value in below)[round(0.99 * (len(below) - 1))]
    across, up = _axes(steps[0], steps[-1], [0.0, tallest], may_be_log=False)
    drawn = []
    for index, (name, lower, upper, own) in enumerate(stacked):
        corners = [(across(step), max(up(value), _TOP)) for step, value in [*upper, *reversed(lower)]]
        drawn.append(
            f'<polygon class="p{index % NUM_COLOURS}" data-name="{escape(name)}" data-values="{_values(own)}" '
            f'points="{_pairs(corners)}"/>'
        )
    return _figure(title, unit, across, up, drawn)


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most MAX_POINTS points, each the mean of as many neighbours."""
    return list(map(_mean, _groups(points)))


def _groups(points: Sequence[Point]) -> list[Sequence[Point]]:
    """At most MAX_POINTS groups of neighbours, all but the last of the same size."""
    size = max(-(-len(points) // MAX_POINTS), 1)
    return [points[start : start + size] for start in range(0, len(points), size)]


def _mean(points: Sequence[Point]) -> Point:
    return fmean(step for step, _ in points), fmean(value for _, value in points)


def number(value: float) -> str:
    """A value with four digits, and thousands separated."""
    return f"{value:,.0f}" if abs(value) >= 1e4 and value < 1e15 else f"{value:.4g}"


def _moving_mean(points: Sequence[Point], window: int) -> list[Point]:
    """The mean of the values around each point: of up to half a `window` on either side."""
    half = window // 2
    return [
        (step, fmean(value for _, value in points[max(index - half, 0) : index + half + 1]))
        for index, (step, _) in enumerate(points)
    ]


def _axes(first: float, last: float, values: Sequence[float], *, may_be_log: bool) -> tuple[_Scale, _Scale]:
    low, high = min(values), max(values)
    is_log = may_be_log and low > 0 and high / low > _LOG_RATIO
    if not is_log:
        margin = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
        # An axis from 0 on stays one.
        low, high = low if low == 0 else low - margin, high + margin
    across = _Scale(first, max(last, first + 1), _LEFT, _WIDTH - _RIGHT)
    return across, _Scale(low, high, _HEIGHT - _BOTTOM, _TOP, is_log)


def _figure(title: str, unit: str, across: _Scale, up: _Scale, drawn: Sequence[str]) -> str:
    lines = []
    for value in _ticks(up.low, up.high, 6, is_log=up.is_log):
        y = up(value)
        lines.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{_tick(value)}</text>')
    for value in _ticks(across.low, across.high, 6):
        if value == round(value):
            x = min(across(value), _WIDTH - _RIGHT - 8)  # a label at the end must not be cut off
            lines.append(f'<text x="{x:.1f}" y="{_HEIGHT - 5}" text-anchor="middle">{_tick(value)}</text>')
    shown = f' <span class="muted">{escape(unit)}</span>' if unit else ""
    box = f"{_LEFT} {_WIDTH - _RIGHT} {across.low:.10g} {across.high:.10g}"
    return (
        f'<figure class="card"><figcaption>{escape(title)}{shown}</figcaption>'
        f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {_WIDTH} {_HEIGHT}" data-box="{box}">'
        f"{''.join(lines)}{''.join(drawn)}</svg></figure>"
    )


def _ticks(low: float, high: float, count: int, *, is_log: bool = False) -> list[float]:
    """Round values between `low` and `high`: multiples of 1, 2 or 5 times a power of ten."""
    if is_log:
        powers = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
        if len(powers) <= count:
            powers = [factor * power for power in powers for factor in (1, 2, 5)]
        every = -(-len(powers) // (2 * count))
        return [value for value in powers[::every] if low <= value <= high]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [size * index for index in range(math.ceil(low / size), math.floor(high / size) + 1)]


def _tick(value: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{suffix}"
    return f"{value:.3g}"


def _pairs(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _values(points: Sequence[Point]) -> str:
    return " ".join(f"{step:.10g},{value:.5g}" for step, value in points)
