"""SequenceLayout: what it holds and what it refuses."""

import pytest
import torch

from xorl.kernels.layout import SequenceLayout


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
        ([0, 2], 2, (1, 1), "cu_seqlens must have shape"),
        ([0, 2], 3, (2,), "positions has shape"),
    ],
)
def test_parts_that_disagree_are_refused(cu_seqlens, positions, lengths, message):
    """Catches a layout whose host lengths do not describe its tensors, which kernels would read out of bounds."""
    with pytest.raises(ValueError, match=message):
        SequenceLayout(torch.tensor(cu_seqlens, dtype=torch.int32), torch.arange(positions), lengths)
