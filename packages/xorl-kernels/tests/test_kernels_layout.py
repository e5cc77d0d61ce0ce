"""SequenceLayout: what it holds and what it refuses."""

import pytest
import torch

from xorl.kernels.layout import RankGroup, SequenceLayout, ShardedLayout

SIZE = 16


def test_positions_restart_in_each_document():
    """Catches positions that run on through the pack, which gives later documents the wrong rotary angles."""
    layout = SequenceLayout.from_lengths([3, 1, 2])
    assert layout.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert layout.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert (layout.cu_seqlens.dtype, layout.positions.dtype) == (torch.int32, torch.int64)
    assert (layout.num_tokens, layout.max_seqlen) == (6, 3)


def test_a_row_without_documents_is_empty():
    """Catches `max` and `cat` of nothing."""
    layout = SequenceLayout.from_lengths([])
    assert (layout.num_tokens, layout.max_seqlen, layout.cu_seqlens.tolist()) == (0, 0, [0])


@pytest.mark.parametrize(
    ("cu_seqlens", "positions", "lengths", "message"),
    [
        ([0, 2, 2], 2, (2, 0), "at least one token"),
        ([0, 2], 2, (1, 1), r"cu_seqlens must be torch.int32 \[3\] for documents of \(1, 1\) tokens, got"),
        ([0, 2], 3, (2,), r"positions must be torch.int64 \[2\] for documents of \(2,\) tokens, got torch.int64 \[3\]"),
        (
            [0, 2, 4],
            [0, 1, 3, 5],
            (2, 2),
            r"positions must count up by one in each .* \(2, 2\) tokens; token 3 does not",
        ),
        ([0, 3, 4], 4, (1, 3), r"cu_seqlens must be the starts of documents of \(1, 3\) tokens"),
        ([0, 2], 2, (2.0,), r"lengths must be integers; got the tuple \(2.0,\)"),
    ],
)
def test_parts_that_disagree_are_refused(cu_seqlens, positions, lengths, message):
    """Catches a layout whose host lengths do not describe its tensors, which kernels would read out of bounds."""
    given = torch.arange(positions) if isinstance(positions, int) else torch.tensor(positions)
    with pytest.raises(ValueError, match=message):
        SequenceLayout(torch.tensor(cu_seqlens, dtype=torch.int32), given, lengths)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 3, 4])}, r"cu_seqlens must be torch.int32 \[3\] .*, got torch.int64 \[3\]"),
        ({"positions": torch.tensor([0.0, 1, 2, 0])}, r"positions must be torch.int64 \[4\] .*, got torch.float32"),
        ({"num_real": torch.tensor([3])}, r"num_real must be a 0-d integer tensor, got torch.int64 \[1\]"),
        ({"num_real": torch.tensor(3.0)}, r"num_real must be a 0-d integer tensor, got torch.float32 \[\]"),
        ({"num_real": torch.tensor(5)}, "num_real must be from 0 to the 4 tokens, got 5"),
        ({"num_trained": torch.tensor([4])}, r"num_trained must have shape \[2\] for 2 documents, got \[1\]"),
    ],
)
def test_tensors_of_another_kind_are_refused(changes, message):
    # Catches offsets that a kernel reads as other numbers, and counts of other documents.
    plain = SequenceLayout.from_lengths([3, 1])
    values = {"cu_seqlens": plain.cu_seqlens, "positions": plain.positions, "lengths": [3, 1], **changes}
    with pytest.raises(ValueError, match=message):
        SequenceLayout(**values)


@pytest.mark.parametrize(("num_ring", "num_ulysses"), [(1, 1), (1, 2), (1, 8), (2, 1), (4, 1), (8, 1), (2, 4), (4, 2)])
def test_parts_of_a_row_have_each_document_token_once(num_ring: int, num_ulysses: int) -> None:
    # Catches a token that two parts have or none, and padding that becomes a document's.
    whole = SequenceLayout.from_lengths([3, 1, 7, 4, 1])  # SIZE tokens
    whole.num_real = torch.tensor(15)
    parts = [
        ShardedLayout(whole, RankGroup(ring, num_ring, "a"), RankGroup(ulysses, num_ulysses, "b"), "c")
        for ring in range(num_ring)
        for ulysses in range(num_ulysses)
    ]
    assert torch.equal(parts[0].join([part.positions for part in parts]), whole.positions)
    for part in parts:
        # Documents are in order, and each token is of the one that it belongs to.
        owner = torch.arange(5).repeat_interleave(whole.cu_seqlens.diff())
        assert torch.equal(torch.arange(5).repeat_interleave(part.cu_seqlens.diff()), part.local(owner))
        assert torch.equal(part.local(torch.arange(SIZE)) < 15, torch.arange(SIZE // len(parts)) < part.num_real)
    assert sum(part.cu_seqlens.diff() for part in parts).tolist() == [3, 1, 7, 4, 1]
    assert [sum(lengths) for lengths in zip(*(part.lengths for part in parts), strict=True)] == [3, 1, 7, 4, 1]
    assert sum(int(part.num_real) for part in parts) == 15
    values = torch.arange(32).view(16, 2)
    for part in parts:
        assert torch.equal(part.join([one.local(values) for one in parts]), values)
    assert whole.join([whole.local(values)]) is values


def test_a_row_that_cannot_be_split_equally_is_refused() -> None:
    # Catches tokens that are dropped at the end.
    with pytest.raises(ValueError, match=r"16 tokens cannot be shared by .* ring of 2 and 3 .* a multiple of 12"):
        ShardedLayout(SequenceLayout.from_lengths([16]), RankGroup(0, 2, "a"), RankGroup(0, 3, "b"), "c")


def test_the_number_of_real_tokens_is_no_view() -> None:
    # Catches a mixture that was compiled for a pack of one document, and stops at the first pack of several: of a view,
    # torch also reads the size of the tensor that it is a view of, and specialises on it without a guard.
    cu_seqlens = torch.tensor([0, 3], dtype=torch.int32)
    layout = SequenceLayout(cu_seqlens, torch.arange(3), (3,), num_real=cu_seqlens[-1])
    assert layout.num_real is not None
    assert layout.num_real.untyped_storage().data_ptr() != cu_seqlens.untyped_storage().data_ptr()
