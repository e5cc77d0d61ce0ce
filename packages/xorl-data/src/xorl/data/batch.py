"""PackedBatch: one micro-batch of packed documents on one flat token axis, the interface between data and training.

Shapes: T tokens (padding included), N documents (the padding document included).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

# The label that PyTorch's losses ignore by default.
IGNORE = -100


@dataclass(frozen=True)
class PackedBatch:
    """`micro_batch_size` bins concatenated to one row and padded once; labels are already shifted.

    `labels[t]` is the token that position t predicts, IGNORE at a document's last position. The padding, if any, is the
    last document: its labels are IGNORE and `num_tokens` does not count it. `extras` have one value per token, aligned
    with `input_ids` (not shifted), 0 in the padding. For losses with several labels per token, labels and extras are
    [T, K].
    """

    input_ids: Tensor  # [T] int64
    labels: Tensor  # [T] int64
    positions: Tensor  # [T] int64, from 0 in each document
    cu_seqlens: Tensor  # [N+1] int32
    lengths: tuple[int, ...]  # N, on the host; sums to T
    num_tokens: int
    num_trained_tokens: int
    extras: dict[str, Tensor] = field(default_factory=dict)  # each [T]

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
        )


def padding_batch(length: int, extras: tuple[str, ...] = ()) -> PackedBatch:
    """A batch of one padding document of `length` tokens, for a rank that has no bins in a short step."""
    assert length >= 1, f"a padding batch needs at least one token, not {length}"
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
