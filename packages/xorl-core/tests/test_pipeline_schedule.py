"""The order of a pipeline's passes: complete, without a deadlock, and as short as it should be."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from tiny_models import hf_config
from xorl.core.models import spec_for
from xorl.core.models.stages import stages_of
from xorl.core.parallel.schedule import Action, Schedule, Step, actions, idle_share, steps

QWEN3_8B = hf_config(
    "qwen3",
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
SCHEDULES: list[tuple[Schedule, int]] = [("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 3)]


@pytest.mark.parametrize(("schedule", "num_chunks"), SCHEDULES)
def test_every_schedule_computes_each_pass_once_and_never_waits_for_ever(schedule: Schedule, num_chunks: int) -> None:
    # Catches a pass that is left out or repeated, a backward pass before its forward pass, neighbours that send in
    # another order than they receive, and stages that wait for each other (an assertion of idle_share).
    for num_stages, count in product((1, 2, 3, 4, 8), (1, 2, 3, 5, 8, 17)):
        plans = [actions(schedule, stage, num_stages, count, num_chunks) for stage in range(num_stages)]
        for plan in plans:
            passes = [Action(*each) for each in product((False, True), range(count), range(num_chunks))]
            assert sorted(plan) == passes
            backward = [action for action in plan if not action.is_forward]
            assert all(plan.index(action._replace(is_forward=True)) < plan.index(action) for action in backward)
        for stage, plan in enumerate(plans):
            following = plans[(stage + 1) % num_stages]
            wraps = stage == num_stages - 1
            assert list(sent_down(plan, num_chunks, wraps=wraps)) == list(received_down(following, wraps=wraps))
            assert list(sent_up(following, wraps=wraps)) == list(received_up(plan, num_chunks, wraps=wraps))
        assert 0 <= idle_share(schedule, [[1.0] * num_chunks] * num_stages, count) < 1


def sent_down(plan: list[Action], num_chunks: int, *, wraps: bool) -> Iterator[tuple[int, int]]:
    """The micro-batches, and the chunks of the next stage, that a stage sends activations for."""
    for is_forward, micro_batch, chunk in plan:
        if is_forward and chunk + wraps < num_chunks:
            yield micro_batch, chunk + wraps


def received_down(plan: list[Action], *, wraps: bool) -> Iterator[tuple[int, int]]:
    return ((index, chunk) for is_forward, index, chunk in plan if is_forward and chunk >= wraps)


def sent_up(plan: list[Action], *, wraps: bool) -> Iterator[tuple[int, int]]:
    return ((index, chunk - wraps) for is_forward, index, chunk in plan if not is_forward and chunk >= wraps)


def received_up(plan: list[Action], num_chunks: int, *, wraps: bool) -> Iterator[tuple[int, int]]:
    return ((index, chunk) for is_forward, index, chunk in plan if not is_forward and chunk + wraps < num_chunks)


class Stage:
    """What a rank of a pipeline queues: transfers by group, each after a number of its passes, and its passes."""

    def __init__(self, number: int, num_stages: int, plan: Sequence[Step], num_chunks: int, num_groups: int) -> None:
        self.queues: dict[tuple[bool, int], deque[tuple[tuple[object, ...], int]]] = defaultdict(deque)
        self.needs: list[tuple[object, ...] | None] = []
        last = number == num_stages - 1

        def transfer(is_down: bool, edge: int, key: tuple[object, ...]) -> None:
            edge %= num_stages
            color = 2 if num_groups > 2 and num_stages % 2 and edge == num_stages - 1 else edge % 2
            group = color if num_groups > 2 else 0
            self.queues[is_down, group].append(((is_down, edge, *key), len(self.needs)))

        def source(action: Action) -> tuple[object, ...] | None:
            is_forward, index, chunk = action
            if (number == chunk == 0) if is_forward else (last and chunk == num_chunks - 1):
                return None
            wraps = (number == 0) if is_forward else last
            step = (-1 if is_forward else 1) * wraps
            return is_forward, (number - is_forward) % num_stages, index, chunk + step

        for action, receives in plan:
            for key in map(source, receives):
                assert key is not None, "received from no other stage"
                transfer(key[0], key[1], key[2:])
            self.needs.append(source(action))
            is_forward, index, chunk = action
            ends = (last and chunk == num_chunks - 1) if is_forward else (number == chunk == 0)
            if not ends:
                transfer(is_forward, number if is_forward else number - 1, (index, chunk))
        self.computed = 0


def is_stuck(plans: Sequence[Sequence[Step]], num_chunks: int, num_groups: int, *, synchronises: bool = False) -> bool:
    """Whether stages whose transfers of a group are one after the other, as NCCL's are, end up waiting for each other.

    num_groups: 1 for each direction, or 3, so that what a rank sends and receives is over different ones.
    synchronises: each pass waits for all transfers that its rank has begun, as it does where it compiles a kernel or
    frees memory of the device.
    """
    stages = [Stage(number, len(plans), plan, num_chunks, num_groups) for number, plan in enumerate(plans)]
    arrived: set[tuple[object, ...]] = set()

    def can_compute(stage: Stage) -> bool:
        if synchronises and any(queue and queue[0][1] <= stage.computed for queue in stage.queues.values()):
            return False
        return stage.needs[stage.computed] in (None, *arrived)

    has_moved = True
    while has_moved:
        has_moved = False
        for stage in stages:
            while stage.computed < len(stage.needs) and can_compute(stage):
                stage.computed, has_moved = stage.computed + 1, True
        ready = Counter(
            queue[0][0]
            for stage in stages
            for queue in stage.queues.values()
            if queue and queue[0][1] <= stage.computed
        )
        for key in [key for key, number in ready.items() if number == 2]:
            arrived.add(key)
            has_moved = True
            for stage in stages:
                for queue in stage.queues.values():
                    if queue and queue[0][0] == key:
                        queue.popleft()
    return any(stage.computed < len(stage.needs) for stage in stages)


@pytest.mark.parametrize("synchronises", [False, True])
@pytest.mark.parametrize(("schedule", "num_chunks"), SCHEDULES)
def test_transfers_never_stop_a_pipeline(schedule: Schedule, num_chunks: int, synchronises: bool) -> None:
    # Catches a send that waits behind a receive of the same group that is only answered after it, and a receive that
    # blocks the device of a stage on which the other stage waits.
    for num_stages, count in product((2, 3, 4, 5, 8), (1, 2, 3, 4, 7, 8, 16)):
        plans = [steps(schedule, stage, num_stages, count, num_chunks) for stage in range(num_stages)]
        for stage, plan in enumerate(plans):
            assert [action for action, _ in plan] == actions(schedule, stage, num_stages, count, num_chunks)
        assert not is_stuck(plans, num_chunks, 3, synchronises=synchronises), (num_stages, count)
    # The check itself: with one group for each direction, interleaved stages stop.
    assert is_stuck(plans, num_chunks, 1, synchronises=synchronises) == (num_chunks > 1)


@pytest.mark.parametrize(
    ("schedule", "num_stages", "num_chunks", "count", "expected"),
    [
        ("1F1B", 4, 1, 8, 3 / 11),
        ("GPipe", 4, 1, 8, 3 / 11),
        ("1F1B", 2, 1, 1, 1 / 2),
        ("Interleaved1F1B", 4, 2, 8, 3 / 19),
        ("1F1B", 1, 1, 3, 0.0),
    ],
)
def test_the_time_that_stages_wait(
    schedule: Schedule, num_stages: int, num_chunks: int, count: int, expected: float
) -> None:
    # Catches a schedule with more bubbles than it should have: (P - 1) / (v m + P - 1) of the time.
    assert idle_share(schedule, [[1.0] * num_chunks] * num_stages, count) == pytest.approx(expected)


def test_a_stage_has_as_many_passes_in_flight_as_stages_follow() -> None:
    # Catches 1F1B with the memory of GPipe.
    for stage in range(4):
        alive, most = 0, 0
        for action in actions("1F1B", stage, 4, 16):
            alive += 1 if action.is_forward else -1
            most = max(most, alive)
        assert most == 4 - stage


def test_layers_are_divided_by_cost_and_the_head_counts() -> None:
    # Catches a last stage that also has the head and as many layers as the others, and layers that no stage has.
    config = spec_for(QWEN3_8B).config_from_hf(QWEN3_8B)
    lengths = [len(chunk) for stage in stages_of(config, 4, 8192) for chunk in stage.chunks]
    assert sorted(lengths[:3]) == [9, 10, 10]
    assert lengths[3] == 7
    interleaved = stages_of(config, 2, 8192, 2)
    assert [(stage.is_first, stage.is_last, len(stage.chunks)) for stage in interleaved] == [
        (True, False, 2),
        (False, True, 2),
    ]
    in_order = [chunk for part in zip(*(stage.chunks for stage in interleaved), strict=True) for chunk in part]
    assert [layer for chunk in in_order for layer in chunk] == list(range(36))
    with pytest.raises(ValueError, match="36 layers cannot be divided into 37 parts"):
        stages_of(config, 37, 8192)
