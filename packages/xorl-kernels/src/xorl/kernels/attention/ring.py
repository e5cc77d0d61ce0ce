"""Ring context parallelism: a rank computes the attention of its queries over keys and values of other ranks.

The ranks of a ring hold the segments of a row as `ShardedLayout` describes. A rank fetches exactly those keys and
values that its queries see and that it does not hold, in one exchange; documents that lie within a segment cost no
communication. A kernel then sees all keys of a query at once, so no partial results of the softmax are merged. In the
backward pass, the keys are fetched again, and each rank returns its share of their gradients, which are summed in fp32
by the rank that holds the keys. Heads are processed in several parts: while one is computed, the next is fetched and
the gradients of the one before are returned.

Shapes: T tokens of this rank, S keys that its queries see, H query heads, G key/value heads, C channels of a head.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from xorl.kernels.attention.kernel import (
    AttentionSpec,
    BackwardKernel,
    Documents,
    ForwardKernel,
    Gradients,
    lse_dtype,
    visible_pairs,
)
from xorl.kernels.attention.sinks import add_sinks, grad_of_sinks
from xorl.kernels.copies import copy_to
from xorl.kernels.layout import ring_ranges
from xorl.kernels.torch_private import start_all_to_all, wait_tensor

RingOperator = Callable[..., tuple[Tensor, Tensor]]
Range = tuple[int, int]

# Parts of the heads that are exchanged one after another, so that the first exchange, which nothing hides, is short.
MAX_PARTS = 4
# A part with fewer fetched elements is not worth kernel launches of its own (measured: docs/records/context.md).
MIN_PART_ELEMENTS = 2**24


class Piece(NamedTuple):
    """Adjacent keys: `rows` of what this rank receives, or of its own. is_repeated: an earlier piece has them too."""

    is_received: bool
    rows: slice
    is_repeated: bool = False


class RingPlan(NamedTuple):
    """What a rank sends, receives and computes for one row.

    Attributes:
        documents, key_documents: of this rank's queries, and of the keys that they see. A document that lies in both
            segments of this rank is two, and its keys in the first segment occur twice.
        pieces: the keys of `key_documents` in order.
        sent: by rank, the rows of this rank whose keys that rank needs.
        received_sizes: by rank, how many rows it sends to this rank.
        most_fetched: the largest number of rows that any rank receives; 0 if no rank does.
    """

    documents: Documents
    key_documents: Documents
    pieces: tuple[Piece, ...]
    sent: tuple[tuple[slice, ...], ...]
    received_sizes: tuple[int, ...]
    most_fetched: int

    @property
    def sent_sizes(self) -> list[int]:
        """By rank, how many rows this rank sends to it."""
        return [sum(rows.stop - rows.start for rows in each) for each in self.sent]


@lru_cache(maxsize=16)
def plan_ring(offsets: tuple[int, ...], rank: int, size: int, window: int | None, device: torch.device) -> RingPlan:
    """The plan of a rank for documents with these offsets in the row. Cached, because all layers need the same plan."""
    held = [ring_ranges(offsets[-1], index, size) for index in range(size)]
    seen = [[(_first_key(offsets, start, window), stop) for start, stop in ranges] for ranges in held]
    # By rank that needs them and rank that has them: ranges of the row.
    fetched = [
        [[] if to == source else _overlaps(_union(seen[to]), held[source]) for source in range(size)]
        for to in range(size)
    ]
    own, received = _numbered(held[rank]), _numbered(list(chain(*fetched[rank])))
    # What is at hand, in the order of the row: the first index in the row, and where the rows are.
    at_hand = sorted(
        [(start, Piece(False, rows)) for start, rows in own] + [(start, Piece(True, rows)) for start, rows in received]
    )
    (first, stop), (next_first, next_stop) = seen[rank]
    border = max(next_first, stop)
    pieces = (
        *_cut(at_hand, first, stop),
        # The queries of the second segment see these too.
        *(piece._replace(is_repeated=True) for piece in _cut(at_hand, next_first, stop)),
        *_cut(at_hand, border, next_stop),
    )
    sent = tuple(tuple(_rows_of(own, start, stop) for start, stop in fetched[to][rank]) for to in range(size))
    return RingPlan(
        _documents(offsets, held[rank], [start for start, _ in held[rank]], device),
        _documents(offsets, held[rank], [first for first, _ in seen[rank]], device),
        pieces,
        sent,
        tuple(sum(stop - start for start, stop in each) for each in fetched[rank]),
        max(sum(stop - start for start, stop in chain(*each)) for each in fetched),
    )


def define_ring(name: str, forward: ForwardKernel, backward: BackwardKernel) -> RingOperator:
    """Register `xorl::attention_{name}_ring` and its gradient, and return the former.

    (q [T, H, C], k and v [T, G, C], sinks [H] or None, offsets of the whole row, this rank, size and process group's
    name of the ring, the fields of an `AttentionSpec`, deterministic) -> (output [T, H, C], log-sum-exp [T, H]).
    Collective over the ring.
    """

    @torch.library.custom_op(f"xorl::attention_{name}_ring", mutates_args=())
    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        offsets: Tensor,
        rank: int,
        size: int,
        group_name: str,
        scale: float,
        window: int | None,
        softcap: float | None,
        causal: bool,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor]:
        plan = plan_ring(tuple(offsets.tolist()), rank, size, window, q.device)
        documents = plan.documents, plan.key_documents
        spec = AttentionSpec(scale, window, softcap, causal)
        results = []
        parts = _split_heads(plan, q, k, v)
        fetch = _start_fetch(plan, group_name, *parts[0][1:])
        for (q_part, *_), following in zip_longest(parts, parts[1:]):
            keys, values = fetch().unbind(1)
            if following is not None:
                fetch = _start_fetch(plan, group_name, *following[1:])
            results.append(forward(q_part, keys, values, *documents, spec, deterministic=deterministic))
        out, lse = (_joined(each, dim=dim) for each, dim in zip(zip(*results, strict=True), (1, 0), strict=True))
        out, lse = add_sinks(out, lse, sinks)
        return out, lse.t()

    @torch.library.custom_op(f"xorl::attention_{name}_ring_backward", mutates_args=())
    def attend_backward(
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        offsets: Tensor,
        rank: int,
        size: int,
        group_name: str,
        scale: float,
        window: int | None,
        softcap: float | None,
        causal: bool,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        plan = plan_ring(tuple(offsets.tolist()), rank, size, window, q.device)
        documents = plan.documents, plan.key_documents
        spec = AttentionSpec(scale, window, softcap, causal)
        grads_q: list[Tensor] = []
        returns: list[Callable[[], tuple[Tensor, Tensor]]] = []
        parts = _split_heads(plan, q, k, v, grad_out, out, lse)
        fetch = _start_fetch(plan, group_name, *parts[0][1:3])
        for (q_part, _, _, *others), following in zip_longest(parts, parts[1:]):
            keys, values = fetch().unbind(1)
            if following is not None:
                fetch = _start_fetch(plan, group_name, *following[1:3])
            grad_part, out_part, lse_part = (x.contiguous() for x in others)
            lse_part = lse_part.t().contiguous()
            grad_q, *grads = backward(
                grad_part,
                q_part.contiguous(),
                keys,
                values,
                out_part,
                lse_part,
                *documents,
                spec,
                deterministic=deterministic,
            )
            grads_q.append(grad_q)
            returns.append(_start_return(plan, group_name, *grads))
        grads_k, grads_v = zip(*(finish() for finish in returns), strict=True)
        return _joined(grads_q, dim=1), _joined(grads_k, dim=1), _joined(grads_v, dim=1)

    @attend.register_fake
    def _(q: Tensor, *inputs: object) -> tuple[Tensor, Tensor]:
        return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype(q.dtype)).t()

    @attend_backward.register_fake
    def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *inputs: object) -> Gradients:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def save(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        q, k, v, sinks, offsets, *options = inputs
        ctx.save_for_backward(q, k, v, *output, offsets, *([] if sinks is None else [sinks]))
        ctx.options = tuple(options)  # pyright: ignore[reportAttributeAccessIssue] a field of this operator
        ctx.mark_non_differentiable(output[1])

    def differentiate(ctx: FunctionCtx, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        options = ctx.options  # pyright: ignore[reportAttributeAccessIssue] set by `save`
        saved = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue] set by `save`
        q, k, v, out, lse, offsets, *sinks = saved
        grad_sinks = grad_of_sinks(grad_out, out, lse.t(), sinks[0]) if sinks else None
        gradients = attend_backward(grad_out, q, k, v, out, lse, offsets, *options)
        return *gradients, grad_sinks, *[None] * 9

    attend.register_autograd(differentiate, setup_context=save)
    return attend


def pairs_of_ring(offsets: Tensor, rank: int, size: int, window: int | None) -> int:
    """The number of (query, key) pairs of a rank."""
    plan = plan_ring(tuple(offsets.tolist()), rank, size, window, torch.device("cpu"))
    return visible_pairs(plan.documents.offsets, window, plan.key_documents.offsets)


def _split_heads(plan: RingPlan, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> list[tuple[Tensor, ...]]:
    """The parts of all tensors' heads, which are processed one after another; as many on all ranks."""
    elements = plan.most_fetched * k.shape[1] * k.shape[2]
    most = min(MAX_PARTS, max(elements // MIN_PART_ELEMENTS, 1))
    num_parts = max(parts for parts in range(1, most + 1) if k.shape[1] % parts == 0)
    return list(zip(*(x.chunk(num_parts, dim=1) for x in (q, k, v, *others)), strict=True))


def _start_fetch(plan: RingPlan, group_name: str, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """Start to exchange keys and values; the result waits, and returns those of the plan's pieces, [S, 2, G, C]."""
    own = torch.stack((k, v), dim=1)
    exchange = _start_exchange(
        _concatenate(own, chain(*plan.sent)), plan.sent_sizes, plan.received_sizes, plan, group_name
    )

    def finish() -> Tensor:
        received = exchange()
        return torch.cat([(received if is_received else own)[rows] for is_received, rows, _ in plan.pieces])

    return finish


def _start_return(
    plan: RingPlan, group_name: str, grad_k: Tensor, grad_v: Tensor
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Start to return the gradients [S, G, C] of the plan's pieces to the ranks that hold the keys.

    The result waits, and returns the sums over ranks for this rank's own keys and values, [T, G, C] in their dtype.
    """
    num_own, shape = int(plan.documents.offsets[-1]), grad_k.shape[1:]
    wide = {"dtype": lse_dtype(grad_k.dtype), "device": grad_k.device}
    own = tuple(torch.empty((num_own, *shape), **wide) for _ in range(2))
    received = torch.empty((sum(plan.received_sizes), 2, *shape), **wide)
    sizes = [piece.rows.stop - piece.rows.start for piece in plan.pieces]
    for piece, *grads in zip(plan.pieces, grad_k.split(sizes), grad_v.split(sizes), strict=True):
        targets = received[piece.rows].unbind(1) if piece.is_received else [each[piece.rows] for each in own]
        for target, grad in zip(targets, grads, strict=True):
            # Every key is seen, so every row is written.
            target.add_(grad) if piece.is_repeated else target.copy_(grad)
    exchange = _start_exchange(received.to(grad_k.dtype), plan.received_sizes, plan.sent_sizes, plan, group_name)

    def finish() -> tuple[Tensor, Tensor]:
        parts = exchange().split([rows.stop - rows.start for rows in chain(*plan.sent)])
        for rows, part in zip(chain(*plan.sent), parts, strict=True):
            for target, added in zip(own, part.unbind(1), strict=True):
                target[rows] += added
        return own[0].to(grad_k.dtype), own[1].to(grad_k.dtype)

    return finish


def _start_exchange(
    sent: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int], plan: RingPlan, group_name: str
) -> Callable[[], Tensor]:
    """Start to send rows to each rank; the result waits, and returns the rows that they sent."""
    if not plan.most_fetched:
        return lambda: sent
    received = start_all_to_all(sent, sent_sizes, received_sizes, group_name)

    def finish() -> Tensor:
        assert sent is not None  # it lives until the exchange is over
        return wait_tensor(received)

    return finish


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts], dim=dim)


def _concatenate(x: Tensor, rows: Iterable[slice]) -> Tensor:
    parts = [x[each] for each in rows]
    return torch.cat(parts) if parts else x[:0]


def _first_key(offsets: tuple[int, ...], start: int, window: int | None) -> int:
    """The first key that the query at `start` sees."""
    document = offsets[bisect_right(offsets, start) - 1]
    return document if window is None else max(document, start - window + 1)


def _union(ranges: list[Range]) -> list[Range]:
    """The union of two ranges, of which the first ends before the second."""
    (first, first_stop), (second, second_stop) = ranges
    return [(min(first, second), second_stop)] if second <= first_stop else ranges


def _overlaps(ranges: list[Range], others: list[Range]) -> list[Range]:
    both = [(max(a, c), min(b, d)) for c, d in others for a, b in ranges]
    return [(start, stop) for start, stop in both if start < stop]


def _numbered(ranges: list[Range]) -> list[tuple[int, slice]]:
    """The start of each range in the row, and its rows among those of all ranges."""
    ends = accumulate((stop - start for start, stop in ranges), initial=0)
    return [(start, slice(*rows)) for (start, _), rows in zip(ranges, pairwise(ends), strict=True)]


def _rows_of(numbered: list[tuple[int, slice]], start: int, stop: int) -> slice:
    """The rows of a part of one of the ranges."""
    first, rows = max((each for each in numbered if each[0] <= start), key=lambda each: each[0])
    return slice(rows.start + start - first, rows.start + stop - first)


def _cut(at_hand: list[tuple[int, Piece]], first: int, stop: int) -> Iterator[Piece]:
    """The pieces, or parts of them, from index `first` of the row up to `stop`."""
    for start, piece in at_hand:
        rows = piece.rows
        begin, end = max(first - start, 0) + rows.start, min(stop - start + rows.start, rows.stop)
        if begin < end:
            yield Piece(piece.is_received, slice(begin, end))


def _documents(offsets: tuple[int, ...], segments: list[Range], firsts: list[int], device: torch.device) -> Documents:
    """The documents of both segments; the first one of a segment begins at its entry of `firsts`."""
    lengths: list[int] = []
    for (start, stop), first in zip(segments, firsts, strict=True):
        ends = [first, *(end for end in offsets if start < end < stop), stop]
        lengths += [end - begin for begin, end in pairwise(ends)]
    indices = torch.tensor([0, *accumulate(lengths)], dtype=torch.int64)
    return Documents(copy_to(device, indices.int()), indices)
