"""What ranks hold of a parameter: where its elements lie in the whole."""

import pytest
import torch

from xorl.core.nn.share import Share, pieces
from xorl.core.shards import Box

WHOLE = torch.arange(13 * 6).view(13, 6)
LAYOUTS = {
    "equal rows": [Share(13, ((0, 7),)), Share(13, ((7, 13),))],
    "a rank without rows": [Share(13, ((0, 13),)), Share(13, ((13, 13),))],
    "ranges of two stacked matrices": [Share(13, ((0, 4), (8, 11))), Share(13, ((4, 8), (11, 13)))],
    "columns": [Share(13, ((0, 13),), columns=(start, start + 2), num_columns=6) for start in (0, 2, 4)],
    "columns of some rows": [
        Share(13, rows, columns=columns, num_columns=6)
        for rows in (((0, 2), (9, 13)), ((2, 9),))
        for columns in ((0, 5), (5, 6))
    ],
}


def held_by(share: Share) -> torch.Tensor:
    rows = torch.cat([WHOLE[start:stop] for start, stop in share.rows])
    return rows if share.columns is None else rows[:, slice(*share.columns)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_shares_of_all_ranks_are_every_element_once(layout: str) -> None:
    """Catches rows of a stacked matrix that are counted on without a gap, and columns that begin at zero everywhere."""
    counts, joined = torch.zeros_like(WHOLE), torch.zeros_like(WHOLE)
    for share in LAYOUTS[layout]:
        held = held_by(share)
        assert share.whole(held.shape) == WHOLE.shape
        assert share.held(WHOLE.shape) == held.shape
        for box, values in pieces(held, share):
            assert torch.equal(values, box.cut(WHOLE))
            box.cut(counts).add_(1)
            box.cut(joined).copy_(values)
    assert torch.equal(joined, WHOLE)
    assert bool((counts == 1).all())


def test_columns_of_blocks_of_rows_are_in_their_last_dim() -> None:
    """Catches rows of a block that are taken for columns, which only matters to blocks with fewer rows."""
    whole = torch.arange(3 * 2 * 6).view(3, 2, 6)
    for start in (0, 2, 4):
        share = Share(3, ((1, 3),), columns=(start, start + 2), num_columns=6, column_dim=2)
        held = whole[1:, :, start : start + 2]
        assert share.whole(held.shape) == whole.shape
        assert share.held(whole.shape) == held.shape
        [(box, values)] = pieces(held, share)
        assert torch.equal(values, box.cut(whole))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_shards", [2, 3, 5])
def test_shards_of_a_share_are_its_elements(layout: str, num_shards: int) -> None:
    """Catches a shard that begins in the second range of rows, one across two ranges, and an empty one."""
    for share in LAYOUTS[layout]:
        held = held_by(share)
        size = -(-len(held) // num_shards) or 1
        for start in range(0, len(held), size):
            shard = held[start : start + size]
            boxes = list(share.boxes(Box((start, 0), tuple(shard.shape))))
            assert torch.equal(torch.cat([box.cut(WHOLE) for box in boxes]), shard)
            assert [box.first_of(WHOLE.shape) for box in boxes] == [int(box.cut(WHOLE)[0, 0]) for box in boxes]
        assert list(share.boxes(Box((len(held), 0), (0, held.shape[1])))) == []
