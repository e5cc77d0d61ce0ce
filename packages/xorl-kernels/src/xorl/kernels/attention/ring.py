"""Ring context parallelism: a rank computes the attention of its queries over keys and values of other ranks.

The ranks of a ring hold the segments of a row as `ShardedLayout` describes. A rank fetches exactly those keys and
values that its queries see and that it does not hold, in one exchange; documents that lie within a segment cost no
communication. A kernel then sees all keys of a query at once, so no partial results of the softmax are merged. In the
backward pass, the keys are fetched again, and each rank returns its share of their gradients, which are summed in fp32
by the rank that holds the keys. Heads are processed in several parts: while one is computed, the next is fetched and
the gradients of the one before are returned.

Shapes: T tokens of this rank, S tokens whose keys it needs, H query heads, G key/value heads, C channels of a head.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from xorl.kernels.attention.documents import Documents, copy_to, lse_dtype
from xorl.kernels.layout import ring_ranges

if TYPE_CHECKING:
    from xorl.kernels.attention.operator import BackwardKernel, ForwardKernel, Gradients

RingOperator = Callable[[Tensor, Tensor, Tensor, Tensor, str, float, int | None, bool], tuple[Tensor, Tensor]]
Range = tuple[int, int]

# Parts of the heads that are exchanged one after another, so that the first exchange, which nothing hides, is short.
MAX_PARTS = 4
# A part whose exchange has fewer elements is not worth a kernel launch of its own.
MIN_PART_ELEMENTS = 2**21


class Segment(NamedTuple):
    """The queries of one segment, and the keys that they see.

    Attributes:
        rows: of this rank's queries.
        keys: of the fetched keys.
        documents, key_documents: within `rows` and `keys`.
    """

    rows: slice
    keys: slice
    documents: Documents
    key_documents: Documents


class RingPlan(NamedTuple):
    """What a rank sends, receives and computes for one row.

    Attributes:
        segments: the two segments of this rank.
        sent: by rank, the rows of this rank whose keys that rank needs.
        received: by rank, how many rows it sends to this rank.
        pieces: the fetched keys in the order of the row: (whether they are received, rows of what is received or of
            this rank's own).
        most_fetched: the largest number of rows that any rank receives; 0 if no rank does.
    """

    segments: tuple[Segment, ...]
    sent: tuple[tuple[slice, ...], ...]
    received: tuple[int, ...]
    pieces: tuple[tuple[bool, slice], ...]
    most_fetched: int

    @property
    def sent_sizes(self) -> list[int]:
        """By rank, how many rows this rank sends to it."""
        return [sum(rows.stop - rows.start for rows in each) for each in self.sent]


@lru_cache(maxsize=16)
def plan_ring(offsets: tuple[int, ...], rank: int, size: int, window: int | None, device: torch.device) -> RingPlan:
    """The plan of a rank for documents with these offsets in the row. Cached, because all layers need the same plan."""
    num_tokens = offsets[-1]
    held = [ring_ranges(num_tokens, index, size) for index in range(size)]
    needed = [_merge([(_first_key(offsets, start, window), stop) for start, stop in ranges]) for ranges in held]
    # By rank that needs them and rank that has them: ranges of the row.
    fetched = [[_overlaps(needed[to], held[source]) for source in range(size)] for to in range(size)]

    def own_rows(start: int, stop: int) -> slice:
        before = 0
        for first, last in held[rank]:
            if first <= start < last:
                return slice(before + start - first, before + stop - first)
            before += last - first
        raise AssertionError("not a range of this rank")

    sent = tuple(() if to == rank else tuple(own_rows(*each) for each in fetched[to][rank]) for to in range(size))
    pieces: list[tuple[int, bool, slice]] = [(start, False, own_rows(start, stop)) for start, stop in held[rank]]
    received, at = [], 0
    for source in range(size):
        before = at
        if source != rank:
            for start, stop in fetched[rank][source]:
                pieces.append((start, True, slice(at, at + stop - start)))
                at += stop - start
        received.append(at - before)
    totals = [sum(_length(fetched[to][source]) for source in range(size) if source != to) for to in range(size)]
    return RingPlan(
        segments=tuple(_segment(offsets, own_rows(*each), each, needed[rank], window, device) for each in held[rank]),
        sent=sent,
        received=tuple(received),
        pieces=tuple((is_received, rows) for _, is_received, rows in sorted(pieces, key=lambda piece: piece[0])),
        most_fetched=max(totals),
    )


def define_ring(name: str, forward: ForwardKernel, backward: BackwardKernel) -> RingOperator:
    """Register `xorl::attention_{name}_ring` and its gradient, and return the former.

    (q [T, H, C], k and v [T, G, C], offsets of the whole row, name of the ring's process group, scale, window,
    deterministic) -> (output [T, H, C], log-sum-exp [T, H]). Collective over the ring.
    """

    @torch.library.custom_op(f"xorl::attention_{name}_ring", mutates_args=())
    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        offsets: Tensor,
        group_name: str,
        scale: float,
        window: int | None,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor]:
        group, plan = _group_and_plan(offsets, group_name, window, q.device)
        options = {"scale": scale, "window": window, "deterministic": deterministic}
        num_parts = _num_parts(plan, k)
        keys_of = _Fetches(plan, group, k, v, num_parts)
        outs, lses = [], []
        for index, part in enumerate(q.chunk(num_parts, dim=1)):
            keys, values = keys_of(index)
            results = [
                forward(part[each.rows], keys[each.keys], values[each.keys], *each[2:], **options)
                for each in plan.segments
            ]
            outs.append(torch.cat([out for out, _ in results]))
            lses.append(torch.cat([lse for _, lse in results], dim=1))
        return torch.cat(outs, dim=1), torch.cat(lses).t()

    @torch.library.custom_op(f"xorl::attention_{name}_ring_backward", mutates_args=())
    def attend_backward(
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        offsets: Tensor,
        group_name: str,
        scale: float,
        window: int | None,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        group, plan = _group_and_plan(offsets, group_name, window, q.device)
        options = {"scale": scale, "window": window, "deterministic": deterministic}
        num_parts = _num_parts(plan, k)
        keys_of = _Fetches(plan, group, k, v, num_parts)
        parts = zip(*(x.chunk(num_parts, dim=1) for x in (grad_out, q, out, lse)), strict=True)
        grads_q: list[Tensor] = []
        grads: list[Tensor] = []  # of keys and values, [T, 2, G / parts, C]
        returning: Callable[[], Tensor] | None = None
        for index, (grad_part, q_part, out_part, lse_part) in enumerate(parts):
            keys, values = keys_of(index)
            grad = torch.zeros((len(keys), 2, *keys.shape[1:]), dtype=lse_dtype(k.dtype), device=k.device)
            of_segments = []
            for each in plan.segments:
                grad_q, grad_k, grad_v = backward(
                    grad_part[each.rows].contiguous(),
                    q_part[each.rows].contiguous(),
                    keys[each.keys],
                    values[each.keys],
                    out_part[each.rows].contiguous(),
                    lse_part[each.rows].t().contiguous(),
                    *each[2:],
                    **options,
                )
                of_segments.append(grad_q)
                grad[each.keys, 0] += grad_k
                grad[each.keys, 1] += grad_v
            grads_q.append(torch.cat(of_segments))
            if returning is not None:
                grads.append(returning())
            returning = _return(plan, group, grad, k.dtype)
        assert returning is not None
        grads.append(returning())
        grad_kv = torch.cat(grads, dim=2)
        return torch.cat(grads_q, dim=1), grad_kv[:, 0].contiguous(), grad_kv[:, 1].contiguous()

    @attend.register_fake
    def _(q: Tensor, *inputs: object) -> tuple[Tensor, Tensor]:
        return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype(q.dtype)).t()

    @attend_backward.register_fake
    def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *inputs: object) -> Gradients:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def save(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        q, k, v, offsets, *options = inputs
        ctx.save_for_backward(q, k, v, *output, offsets)
        ctx.options = tuple(options)  # pyright: ignore[reportAttributeAccessIssue] a field of this operator
        ctx.mark_non_differentiable(output[1])

    def differentiate(ctx: FunctionCtx, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        options = ctx.options  # pyright: ignore[reportAttributeAccessIssue] set by `save`
        saved = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue] set by `save`
        return *attend_backward(grad_out, *saved, *options), None, None, None, None, None

    attend.register_autograd(differentiate, setup_context=save)
    return attend


def pairs_of_ring(offsets: Tensor, group_name: str, window: int | None, count: Callable[..., int]) -> int:
    """The number of (query, key) pairs of this rank, by `visible_pairs`."""
    _, plan = _group_and_plan(offsets, group_name, window, torch.device("cpu"))
    return sum(count(each.documents.offsets, window, each.key_documents.offsets) for each in plan.segments)


class _Fetches:
    """Fetches the keys and values of each part of the heads; the next part is under way when one is handed out."""

    def __init__(self, plan: RingPlan, group: dist.ProcessGroup, k: Tensor, v: Tensor, num_parts: int) -> None:
        self._plan, self._group = plan, group
        self._parts = list(zip(k.chunk(num_parts, dim=1), v.chunk(num_parts, dim=1), strict=True))
        self._pending = self._start(0)

    def __call__(self, index: int) -> tuple[Tensor, Tensor]:
        """k and v [S, G / parts, C] of the part `index`; parts are asked for in order."""
        both = self._pending()
        if index + 1 < len(self._parts):
            self._pending = self._start(index + 1)
        return both[:, 0], both[:, 1]

    def _start(self, index: int) -> Callable[[], Tensor]:
        own = torch.stack(self._parts[index], dim=1)  # [T, 2, G / parts, C]
        if not self._plan.most_fetched:
            return lambda: own
        sent = _rows_of(own, [rows for each in self._plan.sent for rows in each])
        received, wait = _exchange(sent, self._plan.sent_sizes, list(self._plan.received), self._group)

        def finish() -> Tensor:
            wait()
            return torch.cat([(received if is_received else own)[rows] for is_received, rows in self._plan.pieces])

        return finish


def _return(plan: RingPlan, group: dist.ProcessGroup, grad: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Start to return the gradients [S, ..] of fetched keys to the ranks that hold them.

    The result waits, and returns the sums [T, ..] of the gradients of this rank's keys, in `dtype`.
    """
    sizes = [rows.stop - rows.start for _, rows in plan.pieces]
    pieces = list(zip(plan.pieces, grad.split(sizes), strict=True))
    own = torch.cat([piece for (is_received, _), piece in pieces if not is_received])  # [T, ..]
    if not plan.most_fetched:
        return lambda: own.to(dtype)
    # As they were received: by rank, and for each rank in the order of the row.
    others = sorted((rows.start, piece) for (is_received, rows), piece in pieces if is_received)
    sent = torch.cat([piece for _, piece in others]) if others else own[:0]
    returned, wait = _exchange(sent.to(dtype), list(plan.received), plan.sent_sizes, group)

    def finish() -> Tensor:
        wait()
        at = 0
        for rows in (rows for each in plan.sent for rows in each):
            own[rows] += returned[at : at + rows.stop - rows.start]
            at += rows.stop - rows.start
        return own.to(dtype)

    return finish


def _exchange(
    sent: Tensor, sent_sizes: list[int], received_sizes: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, Callable[[], object]]:
    """Start to send rows to each rank; returns where the others' rows arrive, and how to wait for them."""
    received = sent.new_empty((sum(received_sizes), *sent.shape[1:]))
    work = dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=group, async_op=True)
    assert work is not None
    # `sent` lives until the exchange is over.
    return received, lambda: (work.wait(), sent)


def _rows_of(x: Tensor, rows: list[slice]) -> Tensor:
    return torch.cat([x[each] for each in rows]) if rows else x[:0]


def _group_and_plan(
    offsets: Tensor, group_name: str, window: int | None, device: torch.device
) -> tuple[dist.ProcessGroup, RingPlan]:
    group = dist.distributed_c10d._resolve_process_group(group_name)
    return group, plan_ring(tuple(offsets.tolist()), group.rank(), group.size(), window, device)


def _num_parts(plan: RingPlan, k: Tensor) -> int:
    """How many parts the heads are processed in; the same on all ranks."""
    elements = plan.most_fetched * k.shape[1] * k.shape[2]
    most = min(MAX_PARTS, max(elements // MIN_PART_ELEMENTS, 1))
    return max(parts for parts in range(1, most + 1) if k.shape[1] % parts == 0)


def _first_key(offsets: tuple[int, ...], start: int, window: int | None) -> int:
    """The first key that the query at `start` sees."""
    document = offsets[bisect_right(offsets, start) - 1]
    return document if window is None else max(document, start - window + 1)


def _merge(ranges: list[Range]) -> list[Range]:
    """The union of two ranges that end in order."""
    (first, first_stop), (second, second_stop) = ranges
    return [(min(first, second), second_stop)] if second <= first_stop else ranges


def _overlaps(ranges: list[Range], others: list[Range]) -> list[Range]:
    both = [(max(a, c), min(b, d)) for c, d in others for a, b in ranges]
    return [(start, stop) for start, stop in both if start < stop]


def _length(ranges: list[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _segment(
    offsets: tuple[int, ...], rows: slice, segment: Range, needed: list[Range], window: int | None, device: torch.device
) -> Segment:
    start, stop = segment
    first = _first_key(offsets, start, window)
    ends = [*(end for end in offsets if start < end < stop), stop]
    starts = list(accumulate((end - begin for begin, end in needed), initial=0))
    keys = next(
        slice(at + first - begin, at + stop - begin)
        for at, (begin, end) in zip(starts, needed, strict=False)
        if begin <= first < end
    )

    def documents(begin: int) -> Documents:
        indices = torch.tensor([0, *(end - begin for end in ends)], dtype=torch.int64)
        return Documents(copy_to(device, indices.int()), indices)

    return Segment(rows, keys, documents(start), documents(first))
