"""The plan: one integer is the position, whatever the ranks and workers."""

import numpy as np
import pytest

from xorl.data import DataError, DataPlan, pack
from xorl.data.plan import bin_costs, rescale_accumulation, split_step


def make_plan(**changes):
    return DataPlan(**{"num_bins": 103, "bins_per_step": 8, "fingerprint": "f", "seed": 1, **changes})


def test_an_epoch_visits_every_bin_once_and_the_next_in_another_order():
    """Catches repeated or lost bins at the end of an epoch, and epochs that repeat one order."""
    plan = make_plan(num_epochs=3, drop_last=False)
    assert plan.steps_per_epoch == 13
    assert plan.num_steps == 39
    epochs = [np.concatenate([plan.bins_of_step(13 * e + k) for k in range(13)]) for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(103))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [len(plan.bins_of_step(step)) for step in (11, 12, 13)] == [8, 7, 8]


def test_drop_last_drops_per_epoch_and_max_steps_overrides_epochs_both_ways():
    """Catches an estimated step count: the schedule would end early or late."""
    assert make_plan(num_epochs=2).num_steps == 24
    assert all(len(make_plan(num_epochs=2).bins_of_step(step)) == 8 for step in range(24))
    assert make_plan(num_epochs=2, max_steps=5).num_steps == 5
    beyond = make_plan(max_steps=40)
    assert beyond.num_steps == 40
    assert len(beyond.bins_of_step(39)) == 8


def test_what_drop_last_leaves_out_is_counted():
    """Catches a third of the data left out of every epoch with no number that says so."""
    assert make_plan(num_bins=149, bins_per_step=100).left_out_bins == 49
    assert make_plan(num_bins=149, bins_per_step=100, drop_last=False).left_out_bins == 0
    assert make_plan(num_bins=200, bins_per_step=100).left_out_bins == 0


def test_the_order_depends_on_content_seed_and_epoch_and_is_pinned():
    """Catches an order that changes between versions, which would make every resumed run train on other data."""
    first = make_plan().bins_of_step(0).tolist()
    assert first == make_plan(num_epochs=7, max_steps=3).bins_of_step(0).tolist()
    assert first == [62, 70, 14, 87, 77, 74, 88, 63]
    assert first != make_plan(seed=2).bins_of_step(0).tolist()
    assert first != make_plan(fingerprint="g").bins_of_step(0).tolist()
    assert make_plan(shuffle=False).bins_of_step(1).tolist() == list(range(8, 16))


def test_the_hash_names_the_order_and_not_where_it_ends():
    """Catches a resume refused because max_steps was raised, and one accepted over other data."""
    assert make_plan().hash == make_plan(num_epochs=5, max_steps=9).hash
    for change in ({"seed": 2}, {"fingerprint": "g"}, {"bins_per_step": 4}, {"shuffle": False}, {"drop_last": False}):
        assert make_plan(**change).hash != make_plan().hash


def test_too_few_bins_for_one_step_say_what_to_change():
    """Catches a run of zero steps that 'succeeds'."""
    with pytest.raises(DataError, match=r"^bins_per_step: .*takes 8 bins.*fills only 3, .*drop_last"):
        make_plan(num_bins=3)
    assert make_plan(num_bins=3, drop_last=False).num_steps == 1
    with pytest.raises(DataError, match="no bins"):
        make_plan(num_bins=0, drop_last=False)


def test_dealing_gives_every_bin_once_in_equal_numbers_of_micro_batches():
    """Catches bins lost or doubled when a step is split, short steps included."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        dp_size, micro_batch_size, num = rng.integers(1, 9), rng.integers(1, 5), rng.integers(1, 70)
        dealt = split_step(rng.random(num), dp_size=int(dp_size), micro_batch_size=int(micro_batch_size))
        num_micro_batches = -(-int(num) // int(dp_size * micro_batch_size))
        assert dealt.shape == (dp_size, num_micro_batches, micro_batch_size)
        assert sorted(dealt[dealt >= 0].tolist()) == list(range(num))


def test_dealing_balances_ranks_at_every_micro_batch_and_in_sum():
    """Catches ranks that wait for the one with the long documents."""
    rng = np.random.default_rng(0)
    costs = rng.uniform(1.0, 2.0, 256)
    dealt = split_step(costs, dp_size=8, micro_batch_size=2)
    micro = costs[dealt].sum(-1)
    assert (micro.max(0) / micro.min(0)).max() < 1.02
    assert micro.sum(1).max() / micro.sum(1).min() < 1.002
    as_they_come = costs.reshape(8, 16, 2).sum(-1)
    assert micro.max(0).sum() < 0.85 * as_they_come.max(0).sum()


def test_the_cost_of_a_bin_counts_long_documents_more():
    """Catches balancing by tokens alone: a bin of one long document costs more than one of many short."""
    lengths = np.array([100, 50, 50, 100])
    costs = bin_costs(lengths, pack(lengths, bin_len=100, strict_order=True), pair_cost=0.01)
    assert costs.tolist() == [200.0, 150.0, 200.0]


def test_accumulation_is_rescaled_or_the_sizes_that_work_are_named():
    """Catches a resume on another number of ranks that changes the batch."""
    assert rescale_accumulation(64, micro_batch_size=2, dp_size=4) == 8
    assert rescale_accumulation(64, micro_batch_size=2, dp_size=32) == 1
    with pytest.raises(DataError, match=r"^64 bins .*dp_size 3 .*dp_size 1, 2, 4, 8, 16, 32 "):
        rescale_accumulation(64, micro_batch_size=2, dp_size=3)
    with pytest.raises(DataError, match=r"micro_batch_size 1, 2, 4, 8, 16 on this size"):
        rescale_accumulation(64, micro_batch_size=3, dp_size=4)
