"""Collating: shifted labels, restarted positions, one padding."""

import numpy as np
import pytest
import torch

from xorl.data.batch import IGNORE, Column, Document, PackedBatch, collate, padding_batch


def document(ids, labels=None):
    return Document(np.array(ids, np.int32), np.array(ids if labels is None else labels, np.int32))


def test_labels_are_shifted_inside_each_document():
    """Catches a last position that predicts the next document's first token, and a count of labels before the shift."""
    batch = collate([document([1, 2, 3]), document([4]), document([5, 6], [IGNORE, 6])], pad_to_multiple_of=8)
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    assert batch.labels.tolist() == [2, 3, IGNORE, IGNORE, 6, IGNORE, IGNORE, IGNORE]
    assert batch.positions.tolist() == [0, 1, 2, 0, 0, 1, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6, 8]
    assert batch.lengths == (3, 1, 2, 2)
    assert (batch.num_tokens, batch.num_trained_tokens) == (6, 3)


@pytest.mark.parametrize("multiple", [1, 3, 6, 7, 128])
def test_padding_is_one_document_at_the_end(multiple):
    """Catches padding per bin, and padding when none is needed."""
    batch = collate([document([1, 2, 3]), document([4, 5, 6])], pad_to_multiple_of=multiple)
    padding = -6 % multiple
    assert len(batch.input_ids) == 6 + padding
    assert batch.lengths == ((3, 3, padding) if padding else (3, 3))
    assert batch.num_tokens == 6


def test_dtypes_are_those_of_the_contract():
    """Catches int32 ids, which embedding takes and index_select elsewhere does not."""
    batch = collate([document([1, 2])])
    assert batch.input_ids.dtype == batch.labels.dtype == batch.positions.dtype == torch.int64
    assert batch.cu_seqlens.dtype == torch.int32


def test_without_documents_it_is_a_padding_batch():
    """Catches a rank that skips a micro-batch which the others run: its collectives would hang."""
    batch = collate([], pad_to_multiple_of=16)
    assert batch.lengths == (16,)
    assert (batch.num_tokens, batch.num_trained_tokens) == (0, 0)
    assert set(batch.labels.tolist()) == {IGNORE}
    assert padding_batch(1).cu_seqlens.tolist() == [0, 1]


def test_extras_stay_aligned_with_the_ids():
    """Catches extras shifted with the labels or left out of the padding."""
    weights = {"weight": np.array([0.5, 1.5, 2.5], np.float32)}
    rows = [Document(np.array([1, 2, 3]), np.array([1, 2, 3]), weights)]
    batch = collate(rows, pad_to_multiple_of=4, columns={"weight": Column()})
    assert batch.targets["weight"].tolist() == [0.5, 1.5, 2.5, 0.0]
    assert collate([], pad_to_multiple_of=4, columns={"weight": Column()}).targets["weight"].tolist() == [0.0] * 4


def test_weights_stay_with_the_labels_that_they_multiply():
    """Catches a weight on the loss of the token after its own, and one that reaches the next document."""
    documents = [
        Document(np.array([1, 2, 3]), np.array([1, 2, 3]), {"weights": np.array([9.0, 0.5, 0.0], np.float32)}),
        Document(np.array([4, 5]), np.array([4, 5]), {"weights": np.array([9.0, 2.0], np.float32)}),
    ]
    batch = collate(documents, pad_to_multiple_of=8, columns={"weights": Column()})
    assert batch.labels[:5].tolist() == [2, 3, IGNORE, 5, IGNORE]
    assert batch.targets["weights"].tolist() == [0.5, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0]
    assert batch.num_trained_tokens == 2


def test_moving_keeps_everything():
    """Catches a field that `to` forgets."""
    rows = [Document(np.array([1, 2]), np.array([1, 2]), {"weight": np.ones(2, np.float32)})]
    batch = collate(rows, columns={"weight": Column()})
    moved = batch.to("meta")
    assert all(
        t.is_meta for t in (moved.input_ids, moved.labels, moved.positions, moved.cu_seqlens, *moved.targets.values())
    )
    assert (moved.lengths, moved.num_tokens, moved.num_trained_tokens) == ((2,), 2, 1)


def test_columns_go_to_their_receivers_and_survive_joining():
    """Catches a column that the model gets as a target, one that joining loses, and fills of another column."""
    columns = {
        "weights": Column(),
        "recorded": Column("model", np.int16, (2, 3), -1),
        "places": Column("model", np.int64, (3,), 7),
    }
    given = {"weights": np.array([2, 0], np.float32), "recorded": np.arange(12, dtype=np.int16).reshape(2, 2, 3)}
    rows = [Document(np.array([1, 2]), np.array([1, 2]), given), document([3])]
    batch = collate(rows, pad_to_multiple_of=4, columns=columns)
    assert batch.targets["weights"].tolist() == [0, 0, 0, 0]
    assert batch.inputs["recorded"].dtype == torch.int16
    assert batch.inputs["recorded"][:2].tolist() == given["recorded"].tolist()
    assert batch.inputs["recorded"][2:].eq(-1).all()
    assert batch.inputs["places"].eq(7).all()
    assert batch.num_trained_tokens == 0  # the only label has the weight 0
    joined = PackedBatch.join([batch, batch])
    assert joined.lengths == (2, 1, 1, 2, 1, 1)
    assert joined.cu_seqlens.tolist() == [0, 2, 3, 4, 6, 7, 8]
    assert joined.num_tokens == 7
    assert torch.equal(joined.inputs["recorded"], batch.inputs["recorded"].repeat(2, 1, 1))
    assert torch.equal(joined.targets["weights"], batch.targets["weights"].repeat(2))
