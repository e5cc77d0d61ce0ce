"""How documents lie in a packed row: where each begins and ends, and the position of every token in its document."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """N documents laid end to end in one row of T tokens; what every attention function takes.

    The lengths are kept on the host as well, so that no kernel launch waits for the device.

    Attributes:
        cu_seqlens: [N + 1] int32, the first token of each document, and T.
        positions: [T] int64, each token's position in its own document.
        lengths: tokens of each document, in order; their sum is T. Padding is a document like any other.
    """

    cu_seqlens: Tensor
    positions: Tensor
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(length < 1 for length in self.lengths):
            raise ValueError(f"every document needs at least one token, got lengths {self.lengths}")
        if self.cu_seqlens.shape != (len(self.lengths) + 1,):
            raise ValueError(
                f"cu_seqlens of {len(self.lengths)} documents has shape [{len(self.lengths) + 1}], "
                f"got {list(self.cu_seqlens.shape)}"
            )
        if self.positions.shape != (self.num_tokens,):
            raise ValueError(
                f"the lengths add up to {self.num_tokens} tokens, but positions has shape {list(self.positions.shape)}"
            )

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> "SequenceLayout":
        """Lay out documents of these lengths, in this order, with positions counted from 0 in each."""
        ends = list(accumulate(lengths, initial=0))
        positions = [torch.arange(length, dtype=torch.int64) for length in lengths]
        layout = cls(
            cu_seqlens=torch.tensor(ends, dtype=torch.int32),
            positions=torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64),
            lengths=tuple(int(length) for length in lengths),
        )
        return layout.to(device)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths, default=0)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "SequenceLayout":
        """The same layout with its tensors on `device`."""
        return SequenceLayout(
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=non_blocking),
            positions=self.positions.to(device, non_blocking=non_blocking),
            lengths=self.lengths,
        )
