"""Packing: every document once, no bin too long, and the fill and speed that the methods promise."""

import time

import numpy as np
import pytest

from xorl.data import pack

METHODS = [
    {"method": "sequential"},
    {"method": "sequential", "strict_order": True},
    {"method": "multipack"},
    {"method": "multipack", "group_size": 37},
    {"method": "none"},
]


@pytest.mark.parametrize("arguments", METHODS, ids=str)
def test_every_document_is_in_exactly_one_bin_that_holds_it(arguments):
    """Catches a document lost, doubled or packed beyond the bin's length, over many random sets of lengths."""
    rng = np.random.default_rng(1)
    for _ in range(60):
        bin_len = int(rng.integers(1, 3000))
        lengths = rng.integers(1, rng.integers(1, bin_len + 1) + 1, rng.integers(1, 400))
        bins = pack(lengths, bin_len=bin_len, seed=3, **arguments)
        assert sorted(bins.indices.tolist()) == list(range(len(lengths)))
        sums = [int(lengths[bins.documents(index)].sum()) for index in range(len(bins))]
        assert max(sums) <= bin_len
        assert min(len(bins.documents(index)) for index in range(len(bins))) >= 1
        assert bins.fill == pytest.approx(sum(sums) / (len(bins) * bin_len))


def test_packing_is_the_same_every_time():
    """Catches an order that hangs on hashing or on a global random state: a resumed run would train on other bins."""
    lengths = np.random.default_rng(0).integers(1, 100, 1000)
    for arguments in METHODS:
        assert (
            pack(lengths, bin_len=128, seed=5, **arguments).digest
            == pack(lengths, bin_len=128, seed=5, **arguments).digest
        )
    multipack = {pack(lengths, bin_len=128, method="multipack", seed=seed).digest for seed in range(3)}
    assert len(multipack) == 3


def test_strict_order_keeps_the_order_and_the_window_nearly():
    """Catches a strict mode that looks back, and a window that reorders documents within a bin."""
    lengths = np.random.default_rng(0).integers(1, 100, 1000)
    strict = pack(lengths, bin_len=256, method="multipack", strict_order=True)
    assert strict.indices.tolist() == list(range(1000))
    windowed = pack(lengths, bin_len=256)
    for index in range(len(windowed)):
        assert np.all(np.diff(windowed.documents(index)) > 0)
    firsts = [int(windowed.documents(index)[0]) for index in range(len(windowed))]
    assert firsts == sorted(firsts)


def test_next_fit_closes_a_bin_at_the_first_document_that_does_not_fit():
    """Catches an off-by-one in the vectorised next-fit."""
    bins = pack([5, 5, 1, 10, 9, 2, 8], bin_len=10, strict_order=True)
    assert [bins.documents(index).tolist() for index in range(len(bins))] == [[0, 1], [2], [3], [4], [5, 6]]


def test_multipack_is_best_fit_decreasing():
    """Compares the bucketed search with a plain one: catches a wrong successor in the bitmap."""

    def plain_rooms(lengths, bin_len):
        rooms = []
        for length in sorted(lengths, reverse=True):
            fitting = [b for b, room in enumerate(rooms) if room >= length]
            if fitting:
                rooms[min(fitting, key=lambda b: rooms[b])] -= length
            else:
                rooms.append(bin_len - length)
        return sorted(rooms)

    rng = np.random.default_rng(2)
    for bin_len in (7, 100, 1023, 1024, 1025, 5000):
        lengths = rng.integers(1, bin_len + 1, 200).tolist()
        bins = pack(lengths, bin_len=bin_len, method="multipack")
        rooms = [bin_len - sum(lengths[i] for i in bins.documents(b)) for b in range(len(bins))]
        assert sorted(rooms) == plain_rooms(lengths, bin_len)


def test_packing_groups_in_processes_changes_nothing():
    """Catches groups that come back in another order from a pool."""
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    arguments = {"bin_len": 128, "method": "multipack", "group_size": 100, "seed": 1}
    pooled = pack(lengths, **arguments, start_method="fork", num_proc=2)
    assert pooled.digest == pack(lengths, **arguments).digest


@pytest.mark.parametrize(("arguments", "fill"), [({}, 0.975), ({"method": "multipack"}, 0.995)], ids=str)
def test_a_hundred_thousand_samples_pack_fast_and_full(arguments, fill):
    """Catches a quadratic search and a fit that lost its window; the time has room for a busy machine."""
    lengths = np.clip(np.random.default_rng(0).lognormal(6.5, 1.0, 100_000), 1, 8192).astype(np.int64)
    started = time.process_time()
    bins = pack(lengths, bin_len=8192, **arguments)
    assert time.process_time() - started < 2.0
    assert bins.fill > fill


def test_no_documents_make_no_bins():
    """Catches a crash on the empty set."""
    assert len(pack([], bin_len=8)) == 0
    assert len(pack([], bin_len=8, method="multipack")) == 0


@pytest.mark.parametrize("lengths", [[3, 9], [3, 0], [-1]])
def test_a_document_that_does_not_fit_is_named(lengths: list[int]) -> None:
    # Catches a bare assertion, and a bin that is longer than a row.
    with pytest.raises(ValueError, match=r"lengths: document \d has -?\d tokens, but must have from 1 to bin_len, 8"):
        pack(lengths, bin_len=8)
