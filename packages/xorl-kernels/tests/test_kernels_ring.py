"""Plans of a ring: each query's keys are fetched, no others, and the ranks have equally much to compute."""

import pytest
import torch

from xorl.kernels.attention.kernel import visible_pairs
from xorl.kernels.attention.ring import plan_ring
from xorl.kernels.layout import SequenceLayout, ring_ranges

CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("lengths", [[48], [1, 47], [8] * 6, [5, 20, 3, 13, 7], [1] * 48])
def test_each_segment_gets_its_keys_and_no_others(lengths: list[int], size: int, window: int | None) -> None:
    # Catches a key that is missing or that no query sees, rows out of order, and ranks that disagree on what is sent.
    offsets = tuple(SequenceLayout.from_lengths(lengths).offsets.tolist())
    tokens = torch.arange(48)
    plans = [plan_ring(offsets, rank, size, window, CPU) for rank in range(size)]
    own = [torch.cat([tokens[a:b] for a, b in ring_ranges(48, rank, size)]) for rank in range(size)]
    pairs = 0
    for rank, plan in enumerate(plans):
        received = [own[source][rows] for source in range(size) for rows in plans[source].sent[rank]]
        assert [each.sent_sizes[rank] for each in plans] == list(plan.received_sizes)
        others = torch.cat(received) if received else tokens[:0]
        keys = torch.cat([(others if is_received else own[rank])[rows] for is_received, rows, _ in plan.pieces])
        assert set(keys.tolist()) == {*own[rank].tolist(), *others.tolist()}
        parts = zip(plan.pieces, keys.split([piece.rows.stop - piece.rows.start for piece in plan.pieces]), strict=True)
        before: set[int] = set()
        for piece, part in parts:
            assert before & {*part.tolist()} == ({*part.tolist()} if piece.is_repeated else set())
            before |= {*part.tolist()}
        assert len(set(others.tolist())) == len(others)
        queries = own[rank].split(plan.documents.offsets.diff().tolist())
        for query, key in zip(queries, keys.split(plan.key_documents.offsets.diff().tolist()), strict=True):
            begin = max(offset for offset in offsets[:-1] if offset <= int(query[0]))
            first = begin if window is None else max(begin, int(query[0]) - window + 1)
            assert query.tolist() == list(range(int(query[0]), int(query[-1]) + 1))
            assert key.tolist() == list(range(first, int(query[-1]) + 1))
        pairs += visible_pairs(plan.documents.offsets, window, plan.key_documents.offsets)
        assert plan.most_fetched == max(sum(each.received_sizes) for each in plans)
    assert pairs == visible_pairs(torch.tensor(offsets), window)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_long_document_is_equally_much_work_for_all_ranks(size: int) -> None:
    # Catches consecutive parts, of which the last has almost twice the average of work.
    plans = [plan_ring((0, 1024), rank, size, None, CPU) for rank in range(size)]
    work = [visible_pairs(plan.documents.offsets, None, plan.key_documents.offsets) for plan in plans]
    assert max(work) == min(work)


def test_documents_within_segments_are_not_exchanged() -> None:
    # Catches an all-gather where nothing is needed.
    assert plan_ring((0, 4, 8, 12, 16), 0, 2, None, CPU).most_fetched == 0
