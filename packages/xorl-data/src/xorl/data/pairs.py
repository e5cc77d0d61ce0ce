"""Pairs of answers in packed batches, and pairs with the log-probabilities that a reference model gave them.

Shapes: T tokens of a row, P pairs of a row, N stored pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from xorl.data.batch import IGNORE, INPUT_IDS, LABELS, NO_COLUMNS, PREFERENCE, PackedBatch, pack_row
from xorl.data.images.table import StoredImage
from xorl.data.loader import Documents

# Columns of the loss. REFERENCE sums, over a document, to its log-probability under the reference model. CROSSED sums,
# over a row, to that of all documents that `crossed` makes of it.
REFERENCE, CROSSED = "reference_logprobs", "crossed_reference_logprobs"


def crossed(batch: PackedBatch, pad_to_multiple_of: int) -> PackedBatch:
    """Pairs each prompt with the chosen answer of the next pair; the last prompt gets the answer of the first pair.

    The row has as many tokens as the chosen answers with their own prompts. If the batch has fewer than two pairs, it
    is all padding. The batch must be in host memory.
    """
    ids, labels = batch.input_ids.numpy(), batch.labels.numpy()
    bounds = batch.cu_seqlens.tolist()
    spans = [slice(*bounds[2 * pair : 2 * pair + 2]) for pair in range(batch.num_pairs if batch.num_pairs > 1 else 0)]
    # The label of the last token of a prompt is the first token of the answer.
    ends = [int(np.argmax(labels[span] != IGNORE)) + 1 for span in spans]
    documents = [
        {
            INPUT_IDS: np.concatenate([ids[spans[pair]][: ends[pair]], ids[spans[other]][ends[other] :]]),
            LABELS: np.concatenate(
                [np.full(ends[pair] - 1, IGNORE, dtype=np.int64), labels[spans[other]][ends[other] - 1 :]]
            ),
        }
        for pair, other in ((pair, (pair + 1) % len(spans)) for pair in range(len(spans)))
    ]
    num_tokens = sum(len(document[INPUT_IDS]) for document in documents)
    return pack_row(documents, NO_COLUMNS, -num_tokens % pad_to_multiple_of if documents else pad_to_multiple_of)


@dataclass(frozen=True)
class ScoredPairs:
    """Stored pairs with two more columns, REFERENCE and CROSSED.

    scores: [N, 3] float64, the log-probabilities of the chosen and of the rejected answer, and of the document that
    `crossed` makes of the prompt.
    """

    documents: Documents
    scores: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return self.documents.lengths

    @property
    def extra_names(self) -> tuple[str, ...]:
        return (*self.documents.extra_names, REFERENCE, CROSSED)

    @property
    def fingerprint(self) -> str:
        return self.documents.fingerprint

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.documents.document(index)

    def images(self, index: int) -> Sequence[StoredImage]:
        return self.documents.images(index)

    def image_patches(self) -> np.ndarray | None:
        return self.documents.image_patches()

    def extras(self, index: int) -> dict[str, np.ndarray]:
        given = self.documents.extras(index)
        side = given[PREFERENCE]
        reference, crossed_reference = np.zeros_like(side), np.zeros_like(side)
        chosen, rejected, other = self.scores[index]
        _put(reference, 0, chosen)
        _put(reference, int(np.count_nonzero(side > 0)), rejected)
        _put(crossed_reference, 0, other)
        return {**given, REFERENCE: reference, CROSSED: crossed_reference}


def document_sums(values: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """The sums of `values` [T] over the documents of a row, fp64; the last one is that of the padding, if any."""
    lengths = torch.tensor(batch.lengths, device=values.device)
    document = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
    return values.new_zeros(len(lengths), dtype=torch.float64).index_add(0, document, values.double())


def _put(column: np.ndarray, start: int, value: float) -> None:
    """Write a value as the sum of two fp32 numbers; every answer with its prompt has at least two tokens."""
    column[start] = value
    column[start + 1] = value - np.float64(column[start])
