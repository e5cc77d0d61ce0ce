"""Collates documents to one PackedBatch.

Labels are shifted here, within each document, so no other code needs the document boundaries for it.
Shapes: T tokens (padding included), N documents (the padding document included).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from xorl.data.batch import IGNORE, PackedBatch, padding_batch


@dataclass(frozen=True)
class Document:
    """One document as training data. `labels` are not shifted, and are IGNORE where a token is not trained."""

    input_ids: np.ndarray
    labels: np.ndarray
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)


def collate(
    documents: Sequence[Document], *, pad_to_multiple_of: int = 1, extra_names: tuple[str, ...] = ()
) -> PackedBatch:
    """Concatenates all documents in order to one row, padded at the end to a multiple of `pad_to_multiple_of`.

    The padding is a separate document. Without documents, returns a padding batch of `pad_to_multiple_of` tokens.
    """
    if not documents:
        return padding_batch(pad_to_multiple_of, extra_names)
    lengths = [len(document.input_ids) for document in documents]
    num_tokens = sum(lengths)
    num_padding = -num_tokens % pad_to_multiple_of
    total = num_tokens + num_padding

    input_ids = np.zeros(total, dtype=np.int64)
    np.concatenate([document.input_ids for document in documents], out=input_ids[:num_tokens])
    unshifted = np.concatenate([document.labels for document in documents])
    all_lengths = np.array([*lengths, num_padding] if num_padding else lengths, dtype=np.int64)
    ends = np.cumsum(all_lengths)
    labels = np.full(total, IGNORE, dtype=np.int64)
    labels[: num_tokens - 1] = unshifted[1:]
    # The last position of a document has no label, because the next token belongs to another document.
    labels[ends - 1] = IGNORE
    positions = np.arange(total, dtype=np.int64) - np.repeat(ends - all_lengths, all_lengths)
    extras = {}
    for name in extra_names:
        values = np.zeros(total, dtype=np.float32)
        np.concatenate([document.extras[name] for document in documents], out=values[:num_tokens])
        extras[name] = torch.from_numpy(values)
    return PackedBatch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
        lengths=tuple(all_lengths.tolist()),
        num_tokens=num_tokens,
        num_trained_tokens=int(np.count_nonzero(labels != IGNORE)),
        extras=extras,
    )
