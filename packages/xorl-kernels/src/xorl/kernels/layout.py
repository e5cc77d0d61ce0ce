"""The layout of a packed row: where each document begins and ends, and each token's position in its document."""

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import accumulate
from typing import NamedTuple, Self, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from xorl.kernels.arguments import as_integers, is_readable
from xorl.kernels.fused.device import power_of_2
from xorl.kernels.torch_private import maybe_mark_dynamic

LayoutT = TypeVar("LayoutT", bound="SequenceLayout")


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

    Raises ValueError for lengths below 1, for shapes and dtypes that disagree with them and, on the CPU, for values of
    `cu_seqlens` and `positions` that do.
    """

    num_real: Tensor | None = None
    num_trained: Tensor | None = None
    # Only its length counts: the compiler would make a constant of a number.
    _most: Tensor | None = None
    _largest: tuple[int, int] | None = None
    _outer: "SequenceLayout | None" = None

    def __init__(
        self,
        cu_seqlens: Tensor,
        positions: Tensor,
        lengths: Sequence[int],
        num_real: Tensor | None = None,
        num_trained: Tensor | None = None,
    ) -> None:
        lengths = _checked_lengths(lengths)
        ends = list(accumulate(lengths, initial=0))
        _check_vector("cu_seqlens", cu_seqlens, torch.int32, len(lengths) + 1, lengths)
        _check_vector("positions", positions, torch.int64, ends[-1], lengths)
        if is_readable(cu_seqlens) and cu_seqlens.tolist() != ends:
            raise ValueError(f"cu_seqlens must be the starts of documents of {lengths} tokens; got {cu_seqlens}")
        if is_readable(positions) and (jumps := _jumps(positions, ends)):
            raise ValueError(
                f"positions must count up by one in each document of {lengths} tokens; token {jumps[0]} does not: "
                f"{positions}"
            )
        if num_real is not None and (num_real.dim() or num_real.is_floating_point()):
            raise ValueError(f"num_real must be a 0-d integer tensor, got {num_real.dtype} {list(num_real.shape)}")
        if num_real is not None and is_readable(num_real) and not 0 <= int(num_real) <= ends[-1]:
            raise ValueError(f"num_real must be from 0 to the {ends[-1]} tokens, got {int(num_real)}")
        if num_trained is not None and num_trained.shape != (len(lengths),):
            raise ValueError(
                f"num_trained must have shape [{len(lengths)}] for {len(lengths)} documents, "
                f"got {list(num_trained.shape)}"
            )
        self.cu_seqlens = cu_seqlens
        self.positions = positions
        self.lengths = lengths
        # A copy: of a view, the compiler would trace all of `cu_seqlens`, and fix the number of documents, unguarded.
        self.num_real = None if num_real is None else num_real.clone()
        self.num_trained = num_trained
        self.offsets = torch.tensor(ends, dtype=torch.int64, device="cpu")
        self.max_seqlen = max(lengths, default=0)

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> "SequenceLayout":
        """The layout of documents with these lengths, in order; positions start at 0 in each document."""
        lengths = _checked_lengths(lengths)
        cu_seqlens = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)
        return cls(cu_seqlens, _positions_of(lengths), lengths).to(device)

    def mark_dynamic(self) -> None:
        """Mark the numbers of tokens and documents as dynamic; call it before compiled code sees this layout.

        Otherwise the compiler specialises on the first layout and recompiles for the second.
        """
        for tensor in (self.cu_seqlens, self.positions, self.offsets, self._most):
            if tensor is not None:
                maybe_mark_dynamic(tensor, 0)
        if self._outer is not None:
            self._outer.mark_dynamic()

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def most_tokens(self) -> int | None:
        """The largest number of tokens of a rank in this pass; None if this rank does not know it."""
        return None if self._most is None else self._most.shape[0]

    def among(self, most_tokens: int, largest: tuple[int, int] | None = None) -> Self:
        """The same layout for a pass in which no rank has more than `most_tokens`; arguments are equal on all ranks.

        largest: if all have as many tokens, the largest number of documents and of tokens of a document.
        """
        assert most_tokens >= self.num_tokens, f"this rank has {self.num_tokens} tokens, more than {most_tokens}"
        layout = copy(self)
        layout._most, layout._largest = torch.empty(most_tokens, 0), largest
        return layout

    @property
    def whole(self) -> "SequenceLayout":
        """The layout of the whole row, of which this may be a part."""
        return self

    @property
    def rows(self) -> "SequenceLayout":
        """The layout of the tokens that this rank has outside of attention: a part of these if ranks share matrices."""
        return self if self._outer is None else self._outer

    def with_rows(self, rows: "SequenceLayout") -> Self:
        """The same layout with other `rows`."""
        layout = copy(self)
        layout._outer = rows
        return layout

    def local(self, values: Tensor) -> Tensor:
        """The values of this layout's tokens among those of the whole row [T, ..]."""
        return values

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The values of the whole row [T, ..] from those of its parts; undoes `local`. A whole row is its only part."""
        (whole,) = parts
        return whole

    def device_tensors(self) -> list[Tensor]:
        """The tensors on the device, those of the whole row and of `rows` included."""
        own = [self.cu_seqlens, self.positions, *([] if self.num_real is None else [self.num_real])]
        others = [layout for layout in (self.rows, self.whole) if layout is not self]
        return own + [tensor for layout in others for tensor in layout.device_tensors()]

    def with_device_tensors(self, tensors: Iterator[Tensor]) -> Self:
        """The same layout with these instead of `device_tensors`."""
        layout = copy(self)
        layout.cu_seqlens, layout.positions = next(tensors), next(tensors)
        if self.num_real is not None:
            layout.num_real = next(tensors)
        return layout if self._outer is None else layout.with_rows(self._outer.with_device_tensors(tensors))

    def rounded(self) -> Self | None:
        """The row padded with empty documents, so that rows with about as many documents have the same shapes.

        The number of documents and `max_seqlen` become powers of two, and `offsets` those of other documents: for
        kernels that read the documents on the device, and on the host nothing but these two numbers. They are equal on
        all ranks of `among`. None if these ranks have different numbers of tokens, and for a ring, whose ranks read all
        lengths.
        """
        whole = self.whole
        most_documents, longest = len(whole.lengths), whole.max_seqlen
        if self.rows._most is not None:
            if self.rows._largest is None:
                return None
            most_documents, longest = self.rows._largest
        if not longest:
            return None
        return self._with_room(power_of_2(most_documents), min(power_of_2(longest), whole.num_tokens))

    def _with_room(self, num_documents: int, longest: int) -> Self:
        layout = copy(self)
        layout.cu_seqlens = F.pad(self.cu_seqlens, (0, num_documents - len(self.lengths)), value=self.num_tokens)
        layout.offsets = (torch.arange(num_documents + 1, device="cpu") * longest).clamp(max=self.num_tokens)
        layout.max_seqlen = longest
        return layout if self._outer is None else layout.with_rows(self._outer._with_room(num_documents, longest))

    def of_layer(self, index: int) -> "SequenceLayout":
        """The layout to pass to the layer with this index. Returns `self`; `CachedLayout` selects the layer's cache."""
        return self

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "SequenceLayout":
        """The same layout with `cu_seqlens` and `positions` on `device`."""
        moved: SequenceLayout = SequenceLayout(
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=non_blocking),
            positions=self.positions.to(device, non_blocking=non_blocking),
            lengths=self.lengths,
            num_real=None if self.num_real is None else self.num_real.to(device, non_blocking=non_blocking),
            num_trained=None if self.num_trained is None else self.num_trained.to(device, non_blocking=non_blocking),
        )
        return self._with_others(moved, device, non_blocking=non_blocking)

    def _with_others(self, moved: LayoutT, device: torch.device | str, *, non_blocking: bool) -> LayoutT:
        """`moved`, the layout itself on another device, with what else belongs to this one."""
        moved = moved if self.most_tokens is None else moved.among(self.most_tokens, self._largest)
        return moved if self._outer is None else moved.with_rows(self._outer.to(device, non_blocking=non_blocking))


def _checked_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    numbers = as_integers("lengths", lengths)
    if any(number < 1 for number in numbers):
        raise ValueError(f"every document needs at least one token, got lengths {numbers}")
    return numbers


def _check_vector(name: str, values: Tensor, dtype: torch.dtype, size: int, lengths: tuple[int, ...]) -> None:
    if (values.shape, values.dtype) != ((size,), dtype):
        raise ValueError(
            f"{name} must be {dtype} [{size}] for documents of {lengths} tokens, got {values.dtype} "
            f"{list(values.shape)}"
        )


def _jumps(positions: Tensor, ends: Sequence[int]) -> list[int]:
    """The tokens inside documents whose position is not one above that of the token before."""
    jumps = (positions.diff() != 1).nonzero().flatten() + 1
    return sorted(set(jumps.tolist()).difference(ends))


def _positions_of(lengths: tuple[int, ...]) -> Tensor:
    """[T] int64, each token's position in its document, on the CPU."""
    sizes = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    starts = sizes.cumsum(0) - sizes
    return torch.arange(sum(lengths), device="cpu") - starts.repeat_interleave(sizes)


class RankGroup(NamedTuple):
    """The ranks that share something, such as a row, and this rank's place among them.

    Attributes:
        name: of torch's process group.
    """

    rank: int
    size: int
    name: str


class ShardedLayout(SequenceLayout):
    """A rank's part of a packed row, for context parallelism.

    A ring of P ranks splits the row into 2 P equal segments, of which rank i holds segments i and 2 P - 1 - i, so that
    each has as much causal attention to compute. The ranks of a Ulysses group split that into equal parts.

    `cu_seqlens`, `positions` and `num_real` are of this part: a document of the row has the tokens of it that lie here,
    possibly none. `num_trained` and `max_seqlen` are of whole documents.

    Args:
        whole: the layout of the row, whose number of tokens is a multiple of `row_multiple`.
        ring, ulysses: the two groups of this rank.
        group_name: the name of the process group of all ranks that share the row: each ring rank's Ulysses ranks.
    """

    def __init__(self, whole: SequenceLayout, ring: RankGroup, ulysses: RankGroup, group_name: str) -> None:
        multiple = row_multiple(ring.size, ulysses.size)
        if whole.num_tokens % multiple:
            raise ValueError(
                f"a row of {whole.num_tokens} tokens cannot be shared by a ring of {ring.size} and {ulysses.size} "
                f"Ulysses ranks: the number must be a multiple of {multiple}"
            )
        self._whole = whole
        self.ring, self.ulysses, self.group_name = ring, ulysses, group_name
        self._ranges = _ranges_of(whole.num_tokens, ring.rank, ring.size, ulysses.rank, ulysses.size)
        self.cu_seqlens = self._count_before(whole.cu_seqlens)
        self.positions = self.local(whole.positions)
        self.num_real = None if whole.num_real is None else self._count_before(whole.num_real)
        self.num_trained = whole.num_trained
        self.offsets = self._count_before(whole.offsets)
        self.lengths = tuple(self.offsets.diff().tolist())
        self.max_seqlen = whole.max_seqlen

    def mark_dynamic(self) -> None:
        """As `SequenceLayout.mark_dynamic`, for this part and the whole row."""
        super().mark_dynamic()
        self._whole.mark_dynamic()

    @property
    def whole(self) -> SequenceLayout:
        """The layout of the whole row."""
        return self._whole

    def with_device_tensors(self, tensors: Iterator[Tensor]) -> Self:
        """As `SequenceLayout.with_device_tensors`."""
        layout = super().with_device_tensors(tensors)
        layout._whole = self._whole.with_device_tensors(tensors)
        return layout

    def rounded(self) -> Self | None:
        """As `SequenceLayout.rounded`."""
        return None if self.ring.size > 1 else super().rounded()

    def _with_room(self, num_documents: int, longest: int) -> Self:
        layout = super()._with_room(num_documents, longest)
        layout._whole = self._whole._with_room(num_documents, longest)
        return layout

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the ranks that share the row."""
        return self.ring.rank == self.ulysses.rank == 0

    def local(self, values: Tensor) -> Tensor:
        """The rows of this part among those of the whole row [T, ..]."""
        parts = [values[start:stop] for start, stop in self._ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The values of the whole row [T, ..], given those of each part in the order of the ranks that share it."""
        return join_parts(parts, self.ring.size, self.ulysses.size)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "ShardedLayout":
        """The same part with its tensors on `device`."""
        whole = self._whole.to(device, non_blocking=non_blocking)
        moved = ShardedLayout(whole, self.ring, self.ulysses, self.group_name)
        return self._with_others(moved, device, non_blocking=non_blocking)

    def _count_before(self, indices: Tensor) -> Tensor:
        """How many tokens of this part lie before each index of the whole row."""
        counts = [(indices - start).clamp(0, stop - start) for start, stop in self._ranges]
        return counts[0] if len(counts) == 1 else counts[0] + counts[1]


def join_parts(parts: Sequence[Tensor], ring_size: int, ulysses_size: int) -> Tensor:
    """The values of a row [T, ..], given those of each rank's part: by ring rank, and for each by Ulysses rank."""
    num_tokens = sum(len(part) for part in parts)
    pieces: list[tuple[int, Tensor]] = []
    for rank, part in enumerate(parts):
        ranges = _ranges_of(num_tokens, rank // ulysses_size, ring_size, rank % ulysses_size, ulysses_size)
        sizes = [stop - start for start, stop in ranges]
        pieces += [(start, piece) for (start, _), piece in zip(ranges, part.split(sizes), strict=True)]
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda piece: piece[0])])


def row_multiple(ring_size: int, ulysses_size: int) -> int:
    """The number of equal pieces of a row that is shared by a ring and by Ulysses ranks."""
    return ulysses_size * (2 * ring_size if ring_size > 1 else 1)


def ring_ranges(num_tokens: int, rank: int, size: int) -> list[tuple[int, int]]:
    """The (start, stop) of each segment of a row that a rank of a ring holds: all of it, or two."""
    if size == 1:
        return [(0, num_tokens)]
    segment = num_tokens // (2 * size)
    return [(index * segment, (index + 1) * segment) for index in (rank, 2 * size - 1 - rank)]


def _ranges_of(
    num_tokens: int, ring_rank: int, ring_size: int, ulysses_rank: int, ulysses_size: int
) -> list[tuple[int, int]]:
    """The (start, stop) of each range of a row that a rank holds."""
    part = num_tokens // (ring_size * ulysses_size)
    skipped, ranges = ulysses_rank * part, []
    for start, stop in ring_ranges(num_tokens, ring_rank, ring_size):
        first, last = (min(start + max(edge, 0), stop) for edge in (skipped, skipped + part))
        if first < last:
            ranges.append((first, last))
        skipped -= stop - start
    return ranges
