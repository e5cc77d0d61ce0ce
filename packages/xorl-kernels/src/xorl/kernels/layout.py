"""The layout of documents in a packed row: where each begins and ends, and each token's position in its document."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


class SequenceLayout:
    """N documents concatenated to one row of T tokens; an argument of every attention function. Immutable.

    Compiled code may read everything but `lengths`: the compiler would compare a tuple of numbers with that of the
    first batch, and recompile for each new one. It is not a dataclass because a frozen one is read, and so compared, as
    a whole.

    Args:
        cu_seqlens: [N + 1] int32, the first token of each document, and T.
        positions: [T] int64, each token's position in its own document.
        lengths: tokens of each document, in order; their sum is T. Padding is a document like any other.

    Attributes:
        offsets: `cu_seqlens` as int64 on the CPU, so that no kernel launch waits for the device to learn the lengths.
        max_seqlen: tokens of the longest document, 0 without documents.
    """

    def __init__(self, cu_seqlens: Tensor, positions: Tensor, lengths: Sequence[int]) -> None:
        if any(length < 1 for length in lengths):
            raise ValueError(f"every document needs at least one token, got lengths {tuple(lengths)}")
        if cu_seqlens.shape != (len(lengths) + 1,):
            raise ValueError(
                f"cu_seqlens of {len(lengths)} documents has shape [{len(lengths) + 1}], got {list(cu_seqlens.shape)}"
            )
        if positions.shape != (sum(lengths),):
            raise ValueError(
                f"the lengths add up to {sum(lengths)} tokens, but positions has shape {list(positions.shape)}"
            )
        self.cu_seqlens = cu_seqlens
        self.positions = positions
        self.lengths = tuple(lengths)
        self.offsets = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int64, device="cpu")
        self.max_seqlen = max(lengths, default=0)

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> "SequenceLayout":
        """The layout of documents of these lengths, in this order, with positions counted from 0 in each."""
        ends = list(accumulate(lengths, initial=0))
        positions = [torch.arange(length, dtype=torch.int64) for length in lengths]
        layout = cls(
            cu_seqlens=torch.tensor(ends, dtype=torch.int32),
            positions=torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64),
            lengths=tuple(int(length) for length in lengths),
        )
        return layout.to(device)

    def mark_dynamic(self) -> None:
        """Mark the numbers of tokens and documents as dynamic, before compiled code sees this layout.

        Otherwise the compiler compiles once more to learn that they vary.
        """
        for tensor in (self.cu_seqlens, self.positions, self.offsets):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    def of_layer(self, index: int) -> "SequenceLayout":
        """The layout for a model's layer of this index: the layout itself, or one with that layer's cache."""
        return self

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "SequenceLayout":
        """The same layout with `cu_seqlens` and `positions` on `device`."""
        return SequenceLayout(
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=non_blocking),
            positions=self.positions.to(device, non_blocking=non_blocking),
            lengths=self.lengths,
        )
