"""The order in which the ranks of a pipeline compute the passes of micro-batches.

A rank has a stage, which has one or more chunks of layers. Each micro-batch passes all first chunks in the order of the
stages, then all second ones; its backward pass goes the other way. A rank alone computes each backward pass right after
its forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple

Schedule = Literal["1F1B", "GPipe", "Interleaved1F1B"]


class Action(NamedTuple):
    """A pass of one chunk for one micro-batch."""

    is_forward: bool
    micro_batch: int
    chunk: int


def actions(schedule: Schedule, stage: int, num_stages: int, count: int, num_chunks: int = 1) -> list[Action]:
    """The passes of a stage for `count` micro-batches, in order.

    Neighbours send and receive in the same order, and no stages wait for each other. With several chunks, as many
    micro-batches as there are stages go through one chunk before the next.
    """
    # With several chunks, stages would wait for each other at a group of fewer. What is too many is left out below.
    total = count if num_chunks == 1 else -(-count // num_stages) * num_stages
    groups = [range(first, min(first + num_stages, total)) for first in range(0, total, num_stages)]
    forward = [Action(True, index, chunk) for group in groups for chunk in range(num_chunks) for index in group]
    backward = [
        Action(False, index, chunk) for group in groups for chunk in reversed(range(num_chunks)) for index in group
    ]
    after = num_stages - 1 - stage
    ahead = after if num_chunks == 1 else 2 * after + (num_chunks - 1) * num_stages
    ahead = len(forward) if schedule == "GPipe" else min(ahead, len(forward))
    pairs = zip(forward[ahead:], backward, strict=False)
    alternating = [action for pair in pairs for action in pair]
    plan = [*forward[:ahead], *alternating, *backward[len(forward) - ahead :]]
    return [action for action in plan if action.micro_batch < count]


class Step(NamedTuple):
    """A pass, and those passes whose inputs a stage begins to receive before it."""

    action: Action
    receives: tuple[Action, ...]


@cache
def steps(schedule: Schedule, stage: int, num_stages: int, count: int, num_chunks: int = 1) -> tuple[Step, ...]:
    """The passes of a stage in the order of `actions`, and when it begins to receive.

    On a GPU, a transfer that waits for the other stage also blocks whatever waits for the whole device, such as a
    kernel that is compiled or memory that is freed. So a stage begins to receive only what has been sent, by a timeline
    of the passes: before its first pass that starts after the one that sends has ended. No stages wait for each other
    then, even if each pass waits for all transfers that its stage has begun: what it waits for starts earlier in the
    timeline.
    """
    plans = [actions(schedule, each, num_stages, count, num_chunks) for each in range(num_stages)]
    times = _timeline(plans, [[1.0] * num_chunks] * num_stages, backward=2.0)
    plan = plans[stage]
    begun: list[list[tuple[float, Action]]] = [[] for _ in plan]
    for action in plan:
        needed = _needed(action, stage, num_stages, num_chunks)
        if needed is not None and needed[0] != stage:
            _, sent = times[needed]
            first = next(index for index, each in enumerate(plan) if times[stage, each][0] >= sent)
            begun[first].append((sent, action))
    return tuple(
        Step(action, tuple(received for _, received in sorted(found)))
        for action, found in zip(plan, begun, strict=True)
    )


def idle_share(schedule: Schedule, costs: Sequence[Sequence[float]], count: int, *, backward: float = 2.0) -> float:
    """The share of the time of a step's passes in which the ranks of a pipeline wait, on average.

    costs: of the forward pass of each chunk, by stage. backward: the cost of a backward pass, in forward passes.
    """
    num_stages, num_chunks = len(costs), len(costs[0])
    plans = [actions(schedule, stage, num_stages, count, num_chunks) for stage in range(num_stages)]
    times = _timeline(plans, costs, backward)
    busy = sum(map(sum, costs)) * (1 + backward) * count
    return 1 - busy / (num_stages * max(end for _, end in times.values()))


def _timeline(
    plans: Sequence[Sequence[Action]], costs: Sequence[Sequence[float]], backward: float
) -> dict[tuple[int, Action], tuple[float, float]]:
    """When each pass of each stage starts and ends, if transfers take no time."""
    num_stages, num_chunks = len(costs), len(costs[0])
    times: dict[tuple[int, Action], tuple[float, float]] = {}
    at, now = [0] * num_stages, [0.0] * num_stages
    while any(index < len(plan) for index, plan in zip(at, plans, strict=True)):
        before = list(at)
        for stage, plan in enumerate(plans):
            while at[stage] < len(plan):
                action = plan[at[stage]]
                needed = _needed(action, stage, num_stages, num_chunks)
                if needed is not None and needed not in times:
                    break
                start = max(now[stage], 0.0 if needed is None else times[needed][1])
                now[stage] = start + costs[stage][action.chunk] * (1.0 if action.is_forward else backward)
                times[stage, action] = start, now[stage]
                at[stage] += 1
        assert at != before, "the stages wait for each other"
    return times


def _needed(action: Action, stage: int, num_stages: int, num_chunks: int) -> tuple[int, Action] | None:
    """The stage and the pass whose result a pass needs; None if it needs that of no other pass."""
    is_forward, micro_batch, chunk = action
    if is_forward:
        if stage:
            return stage - 1, action
        return (num_stages - 1, Action(True, micro_batch, chunk - 1)) if chunk else None
    if stage < num_stages - 1:
        return stage + 1, action
    if chunk < num_chunks - 1:
        return 0, Action(False, micro_batch, chunk + 1)
    return stage, Action(True, micro_batch, chunk)
