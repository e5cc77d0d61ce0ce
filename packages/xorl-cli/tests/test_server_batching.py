"""Batching: every datum on one rank, ranks alike, and values per token back where they came from."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xorl.data.batch import IGNORE, Document, collate
from xorl.server.batching import Example, Layout, assign, build_row, check_examples, in_datum_order

LENGTHS = st.lists(st.integers(1, 40), max_size=40)


def example(length: int, seed: int = 0, num_targets: int = 0, owner: str = "", **fields: float) -> Example:
    shape = (length, num_targets) if num_targets else (length,)
    generator = np.random.default_rng(seed)
    return Example(
        generator.integers(0, 64, length),
        generator.integers(0, 64, shape),
        {name: np.full(shape, value, np.float32) for name, value in fields.items()},
        owner,
    )


@given(LENGTHS, st.integers(1, 5), st.integers(40, 90), st.booleans())
@settings(max_examples=80, deadline=None)
def test_each_datum_is_dealt_once_and_ranks_are_alike(
    lengths: list[int], num_ranks: int, bin_len: int, packs: bool
) -> None:
    # Catches data that are computed twice or never, rows that are too long, and ranks that would wait for others.
    dealt = assign(lengths, num_ranks=num_ranks, bin_len=bin_len, packs=packs)
    assert dealt == assign(lengths, num_ranks=num_ranks, bin_len=bin_len, packs=packs)
    everything = [index for rank in range(num_ranks) for index in dealt.order(rank)]
    assert sorted(everything) == list(range(len(lengths)))
    assert len({len(rows) for rows in dealt.bins}) == 1
    for members in (row for rows in dealt.bins for row in rows):
        assert sum(lengths[index] for index in members) <= bin_len
        assert packs or len(members) <= 1
        assert list(members) == sorted(members)


def test_data_are_spread_over_all_ranks() -> None:
    # Catches ranks that idle because all data fit one row of another, and rows that are computed at once and unlike.
    dealt = assign([100] * 8, num_ranks=4, bin_len=32000)
    assert [len(dealt.order(rank)) for rank in range(4)] == [2, 2, 2, 2]
    lengths = [3000, 2900, 1000, 900, 800, 700, 600, 500, 400, 300, 200, 100]
    dealt = assign(lengths, num_ranks=2, bin_len=4000)
    sums = [[sum(lengths[index] for index in row) for row in rows] for rows in dealt.bins]
    assert len(dealt.bins[0]) == 2
    assert max(abs(one - other) for one, other in zip(*sums, strict=True)) <= 200
    assert abs(sum(sums[0]) - sum(sums[1])) <= 200


def test_build_row_owners_are_neighbours() -> None:
    # Catches an adapter whose tokens are apart in a row, which a bank refuses.
    examples = [example(5 + index, index, owner="abc"[index % 3]) for index in range(12)]
    dealt = assign([len(e.tokens) for e in examples], num_ranks=2, bin_len=60, owners=[e.owner for e in examples])
    for members in (row for rows in dealt.bins for row in rows):
        owners = [owner for owner, _ in build_row(examples, members, Layout.of(examples, 8))]
        assert len(owners) == len(set(owners))


def test_a_row_is_what_local_training_makes_of_the_same_documents() -> None:
    # Catches labels that are shifted again, and rows that differ from those of local training in a bit.
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 64, length) for length in (7, 3, 12)]
    wanted = collate([Document(ids, ids) for ids in documents], pad_to_multiple_of=8)
    examples = [Example(ids, np.append(ids[1:], IGNORE)) for ids in documents]
    ((_, row),) = build_row(examples, (0, 1, 2), Layout.of(examples, 8))
    assert (row.lengths, row.num_tokens, row.num_trained_tokens) == (
        wanted.lengths,
        wanted.num_tokens,
        wanted.num_trained_tokens,
    )
    for name in ("input_ids", "labels", "positions", "cu_seqlens"):
        assert torch.equal(getattr(row, name), getattr(wanted, name)), name


def test_padding_and_targets_that_a_datum_lacks_are_not_asked() -> None:
    # Catches padding that is trained, weights of 0 that hide a target, and weights that are 0 where none were given.
    examples = [example(3, 0, num_targets=2, weights=0.0), example(2, 1, num_targets=3), example(4, 2)]
    layout = Layout.of(examples, 8)
    ((_, row),) = build_row(examples, (0, 1, 2), layout)
    assert row.labels.shape == (16, 3)
    asked = torch.tensor([2] * 3 + [3] * 2 + [1] * 4 + [0] * 7)
    assert torch.equal((row.labels != IGNORE).sum(dim=1), asked)
    assert row.targets["weights"][:3].eq(0).all()
    assert row.targets["weights"][3:5].eq(1).all()
    assert (row.num_tokens, row.num_trained_tokens, row.lengths) == (9, 6, (3, 2, 4, 7))
    ((_, padding),) = build_row(examples, (), layout)
    assert (padding.num_tokens, padding.num_trained_tokens, padding.lengths) == (0, 0, (8,))
    assert padding.labels.shape == (8, 3)
    assert padding.labels.eq(IGNORE).all()


def test_records_are_in_the_rows_of_their_tokens() -> None:
    # Catches a record that packing moves or loses, and padding that all goes to one expert.
    records = [np.arange(length * 6, dtype=np.int16).reshape(length, 3, 2) for length in (3, 4)]
    examples = [replace(example(3), routes=records[0]), example(2), replace(example(4), routes=records[1])]
    layout = Layout.of(examples, 8)
    ((_, row),) = build_row(examples, (0, 1, 2), layout)
    free = np.full((7, 3, 2), -1)
    np.testing.assert_array_equal(row.inputs["recorded"], np.concatenate([records[0], free[:2], records[1], free]))
    for members in ((1,), ()):
        ((_, other),) = build_row(examples, members, layout)
        assert other.inputs["recorded"].shape == (8, 3, 2)
        assert other.inputs["recorded"].eq(-1).all()
    ((_, without),) = build_row(examples[1:2], (0,), Layout.of(examples[1:2], 8))
    assert not without.inputs


@given(LENGTHS.filter(bool), st.integers(1, 4), st.sampled_from([0, 1, 3]))
@settings(max_examples=50, deadline=None)
def test_values_come_back_in_the_order_of_the_data(lengths: list[int], num_ranks: int, num_targets: int) -> None:
    # Catches log-probabilities of another datum, and such of padding.
    examples = [example(length, index, num_targets) for index, length in enumerate(lengths)]
    layout = Layout.of(examples, 8)
    dealt = assign(lengths, num_ranks=num_ranks, bin_len=64)
    by_rank = []
    for rows in dealt.bins:
        parts = [build_row(examples, members, layout)[0][1] for members in rows]
        values = [part.labels[: part.num_tokens].float().numpy() for part in parts]
        by_rank.append(np.concatenate(values))
    got = in_datum_order(examples, dealt, by_rank)
    for one, values in zip(examples, got, strict=True):
        np.testing.assert_array_equal(values, one.targets)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (example(9), r"datum 1 has 9 tokens.*from 1 to 8 \(sample_packing_sequence_len\)"),
        (Example(np.array([1, 64]), np.array([1, 1])), "datum 1: tokens contains 64, which is outside the vocabulary"),
        (Example(np.array([1, 2]), np.array([1, -1])), "datum 1: target_tokens contains -1"),
        (Example(np.array([1, 2]), np.array([1])), r"target_tokens has shape \[1\]; it must be \[2\] or \[2, K\]"),
        (Example(np.array([1]), np.array([1]), {"advantages": np.ones(2, np.float32)}), r"advantages has shape \[2\]"),
        (example(2, advantages=float("nan")), "datum 1: advantages has values that are not finite"),
        (example(2, weights=0.5), "datum 1 has no advantages, but other data of the call do"),
    ],
)
def test_what_cannot_be_computed_is_named(bad: Example, message: str) -> None:
    # Catches a bad datum that takes the workers down, and a message that does not say which it is.
    with pytest.raises(ValueError, match=message):
        check_examples([example(2, advantages=1.0, logprobs=-1.0), bad], bin_len=8, vocab_size=64)


def test_data_of_different_inputs_are_refused_whatever_their_number() -> None:
    """Catches a datum that lacks what a later one has, which only the rank that is dealt it would find."""
    data = [example(2, logprobs=-1.0, weights=1.0), example(2, logprobs=-1.0, advantages=1.0)]
    with pytest.raises(ValueError, match="datum 0 has no advantages, but other data of the call do"):
        check_examples(data, bin_len=8, vocab_size=64)
