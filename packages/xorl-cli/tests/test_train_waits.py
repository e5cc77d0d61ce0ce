"""What long waits for collectives come from."""

import pytest

from xorl.train.observe.waits import StepWaits, diagnosis


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([(1.0, 0.02, 0.5), (1.0, 0.03, 0.5), (1.0, 0.01, 0.5)], []),
        ([(2.2, 1.3, 1.0), (2.2, 1.3, 1.0), (2.2, 0.05, 1.0), (2.2, 1.3, 1.0)], ["rank 2 takes 2150 ms", "clocks"]),
        (
            [(2.2, 1.3, 1.0), (2.2, 0.05, 0.0), (2.2, 1.3, 1.0), (2.2, 1.3, 1.0)],
            ["rank 1 takes 2150 ms", "its GPU waits"],
        ),
        ([(2.2, 1.3, 1.0), (2.2, 1.3, 1.0), (2.2, 1.25, 0.0)], ["all ranks wait for communication, up to 59%"]),
        ([(2.0, 0.9, 1.0), (2.0, 0.1, 1.0)], ["rank 1 takes 1900 ms"]),
    ],
)
def test_a_slow_rank_is_told_from_slow_communication_and_from_a_slow_host(
    ranks: list[tuple[float, float, float]], words: list[str]
) -> None:
    # Catches advice about communication where one GPU or one host is slow, and warnings about waits that are usual.
    found = diagnosis([StepWaits(*rank) for rank in ranks], is_sharded=True)
    assert (found is not None) == bool(words)
    assert [word for word in words if word not in (found or "")] == []


@pytest.mark.parametrize("is_sharded", [False, True])
def test_options_of_sharding_are_named_only_where_they_have_an_effect(is_sharded: bool) -> None:
    # Catches advice that the configuration refuses.
    found = diagnosis([StepWaits(2.0, 1.0, 0.5)] * 2, is_sharded=is_sharded)
    assert "train.micro_batch_size" in found
    assert ("train.fsdp_collectives" in found) == is_sharded
