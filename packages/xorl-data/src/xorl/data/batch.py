"""PackedBatch: one micro-batch of packed documents on one flat token axis, the interface between data and training.

Labels are shifted here, within each document, so no other code needs the document boundaries for it.
Shapes: T tokens (padding included), N documents (the padding document included).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

# The label that PyTorch's losses ignore by default.
IGNORE = -100


@dataclass(frozen=True)
class Document:
    """One document as training data. `labels` are not shifted, and are IGNORE where a token is not trained."""

    input_ids: np.ndarray
    labels: np.ndarray
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class PackedBatch:
    """`micro_batch_size` bins concatenated to one row and padded once; labels are already shifted.

    `labels[t]` is the token that position t predicts, IGNORE at a document's last position. The padding, if any, is the
    last document: its labels are IGNORE and `num_tokens` does not count it. `extras` have one value per token, aligned
    with `input_ids` (not shifted), 0 in the padding. For losses with several labels per token, labels and extras are
    [T, K].

    `routes`, if given, are the experts that replace the routers' choice in each layer that has any; -1 for tokens that
    are routed freely, such as padding.
    """

    input_ids: Tensor  # [T] int64
    labels: Tensor  # [T] int64
    positions: Tensor  # [T] int64, from 0 in each document
    cu_seqlens: Tensor  # [N+1] int32
    lengths: tuple[int, ...]  # N, on the host; sums to T
    num_tokens: int
    num_trained_tokens: int
    extras: dict[str, Tensor] = field(default_factory=dict)  # each [T]
    routes: Tensor | None = None  # [T, layers with experts, experts per token] int16

    @property
    def document_lengths(self) -> tuple[int, ...]:
        """The lengths without the padding document."""
        return self.lengths if self.num_tokens == len(self.input_ids) else self.lengths[:-1]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        return self._with_tensors(lambda tensor: tensor.pin_memory())

    def _with_tensors(self, move: Callable[[Tensor], Tensor]) -> PackedBatch:
        return replace(
            self,
            input_ids=move(self.input_ids),
            labels=move(self.labels),
            positions=move(self.positions),
            cu_seqlens=move(self.cu_seqlens),
            extras={name: move(tensor) for name, tensor in self.extras.items()},
            routes=None if self.routes is None else move(self.routes),
        )


def collate(
    documents: Sequence[Document], *, pad_to_multiple_of: int = 1, extra_names: tuple[str, ...] = ()
) -> PackedBatch:
    """Concatenates all documents in order to one row, padded at the end to a multiple of `pad_to_multiple_of`.

    The padding is a separate document. Without documents, returns a padding batch of `pad_to_multiple_of` tokens.
    """
    if pad_to_multiple_of < 1:
        raise ValueError(f"pad_to_multiple_of: {pad_to_multiple_of}, want at least 1")
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


def padding_batch(length: int, extras: tuple[str, ...] = ()) -> PackedBatch:
    """A batch of one padding document of `length` tokens, for a rank that has no bins in a short step."""
    if length < 1:
        raise ValueError(f"length: a padding batch needs at least one token, not {length}")
    return PackedBatch(
        input_ids=torch.zeros(length, dtype=torch.int64),
        labels=torch.full((length,), IGNORE, dtype=torch.int64),
        positions=torch.arange(length, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
        lengths=(length,),
        num_tokens=0,
        num_trained_tokens=0,
        extras={name: torch.zeros(length, dtype=torch.float32) for name in extras},
    )
