"""The layout of a packed row: where each document begins and ends, and each token's position in its document."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor


class SequenceLayout:
    """N documents concatenated into one row of T tokens; an argument of every attention function. Immutable.

    Compiled code may read everything except `lengths`: the compiler would guard on the tuple's values and recompile for
    each new batch. This is not a frozen dataclass because the compiler guards on every field of a dataclass.

    Args:
        cu_seqlens: [N + 1] int32, the index of the first token of each document, followed by T.
        positions: [T] int64, each token's position in its document.
        lengths: number of tokens of each document, in order; their sum is T. Padding counts as a document.
        num_real: 0-d integer tensor on the device: tokens from this index on are padding, which mixtures of experts
            leave out. None: there is no padding.
        num_trained: [N], how many tokens of each document are trained; None: all.

    Attributes:
        offsets: `cu_seqlens` as int64 on the CPU, so that kernel launches need not wait for the device.
        max_seqlen: number of tokens of the longest document; 0 without documents.
    """

    num_real: Tensor | None = None
    num_trained: Tensor | None = None

    def __init__(
        self,
        cu_seqlens: Tensor,
        positions: Tensor,
        lengths: Sequence[int],
        num_real: Tensor | None = None,
        num_trained: Tensor | None = None,
    ) -> None:
        if any(length < 1 for length in lengths):
            raise ValueError(f"every document needs at least one token, got lengths {tuple(lengths)}")
        if cu_seqlens.shape != (len(lengths) + 1,):
            raise ValueError(
                f"cu_seqlens must have shape [{len(lengths) + 1}] for {len(lengths)} documents, "
                f"got {list(cu_seqlens.shape)}"
            )
        if positions.shape != (sum(lengths),):
            raise ValueError(
                f"the lengths add up to {sum(lengths)} tokens, but positions has shape {list(positions.shape)}"
            )
        self.cu_seqlens = cu_seqlens
        self.positions = positions
        self.lengths = tuple(lengths)
        self.num_real = num_real
        self.num_trained = num_trained
        self.offsets = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int64, device="cpu")
        self.max_seqlen = max(lengths, default=0)

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> "SequenceLayout":
        """The layout of documents with these lengths, in order; positions start at 0 in each document."""
        ends = list(accumulate(lengths, initial=0))
        positions = [torch.arange(length, dtype=torch.int64) for length in lengths]
        layout = cls(
            cu_seqlens=torch.tensor(ends, dtype=torch.int32),
            positions=torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64),
            lengths=tuple(int(length) for length in lengths),
        )
        return layout.to(device)

    def mark_dynamic(self) -> None:
        """Mark the numbers of tokens and documents as dynamic; call it before compiled code sees this layout.

        Otherwise the compiler specialises on the first layout and recompiles for the second.
        """
        for tensor in (self.cu_seqlens, self.positions, self.offsets):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def whole(self) -> "SequenceLayout":
        """The layout of the whole row, of which this may be a part."""
        return self

    def local(self, values: Tensor) -> Tensor:
        """The values of this layout's tokens among those of the whole row [T, ..]."""
        return values

    def of_layer(self, index: int) -> "SequenceLayout":
        """The layout to pass to the layer with this index. Returns `self`; `CachedLayout` selects the layer's cache."""
        return self

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "SequenceLayout":
        """The same layout with `cu_seqlens` and `positions` on `device`."""
        return SequenceLayout(
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=non_blocking),
            positions=self.positions.to(device, non_blocking=non_blocking),
            lengths=self.lengths,
            num_real=None if self.num_real is None else self.num_real.to(device, non_blocking=non_blocking),
            num_trained=None if self.num_trained is None else self.num_trained.to(device, non_blocking=non_blocking),
        )


class ShardedLayout(SequenceLayout):
    """One of several equal parts of a packed row, for context parallelism.

    `cu_seqlens`, `positions` and `num_real` are of this part: a document of the row has the tokens of it that lie here,
    possibly none. `num_trained` and `max_seqlen` are of whole documents.

    Args:
        whole: the layout of the row, whose number of tokens is a multiple of `num_shards`.
        shard, num_shards: the index of this part, and the number of parts.
        group_name: the name of the process group of the ranks that have the parts, in order.
    """

    def __init__(self, whole: SequenceLayout, shard: int, num_shards: int, group_name: str) -> None:
        if whole.num_tokens % num_shards:
            raise ValueError(f"a row of {whole.num_tokens} tokens cannot be split into {num_shards} equal parts")
        self._whole = whole
        self.shard = shard
        self.num_shards = num_shards
        self.group_name = group_name
        self.size = whole.num_tokens // num_shards
        start = shard * self.size
        self.start = start
        self.cu_seqlens = (whole.cu_seqlens - start).clamp(0, self.size)
        self.positions = whole.positions[start : start + self.size]
        self.num_real = None if whole.num_real is None else (whole.num_real - start).clamp(0, self.size)
        self.num_trained = whole.num_trained
        ends = [min(max(end - start, 0), self.size) for end in whole.offsets.tolist()]
        self.lengths = tuple(last - first for first, last in pairwise(ends))
        self.offsets = torch.tensor(ends, dtype=torch.int64, device="cpu")
        self.max_seqlen = whole.max_seqlen

    def mark_dynamic(self) -> None:
        """As `SequenceLayout.mark_dynamic`, for this part and the whole row."""
        super().mark_dynamic()
        self._whole.mark_dynamic()

    @property
    def whole(self) -> SequenceLayout:
        """The layout of the whole row."""
        return self._whole

    def local(self, values: Tensor) -> Tensor:
        """The rows of this part among those of the whole row [T, ..]."""
        return values[self.start : self.start + self.size]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "ShardedLayout":
        """The same part with its tensors on `device`."""
        whole = self._whole.to(device, non_blocking=non_blocking)
        return ShardedLayout(whole, self.shard, self.num_shards, self.group_name)
