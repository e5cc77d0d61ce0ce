"""Chooses the samples and tokens of the next pass: admission, blocks, preemption. Independent of the model."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xorl.server.sampler.blocks import BlockPool, block_keys, next_key
from xorl.server.sampler.edits import LogitEdits
from xorl.server.sampler.request import GenerationRequest

# How many continuations of a request may run however many others wait: a usual number of samples.
MIN_SHARE = 16


@dataclass(eq=False)
class Continuation:
    """One sample of a request while it is generated: its tokens, and how many of them are in the cache."""

    request_id: int
    index: int
    request: GenerationRequest
    tokens: list[int]
    # Hidden states are needed for the prompt's tokens from this one on (None: for none), since the cache does not hold
    # them.
    first_scored: int | None
    blocks: list[int] = field(default_factory=list)
    # Where its states are while it runs, if the model has recurrences.
    slot: int | None = None
    keys: list[bytes] = field(default_factory=list)
    num_cached: int = 0
    num_cache_hits: int | None = None
    logprobs: list[float] = field(default_factory=list)
    top_tokens: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    # Routes of the tokens from `first_routed` on that were computed; None if they are not needed.
    routes: list[NDArray[np.int16]] | None = None
    first_routed: int = 0
    edits: LogitEdits | None = None

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def problem(self) -> str | None:
        """Why the sample cannot follow its grammar any further."""
        return None if self.edits is None or self.edits.matcher is None else self.edits.matcher.problem

    @property
    def num_shareable(self) -> int:
        """How many of the first tokens need not be computed if they are in the cache.

        The last one is always computed, since the next one is drawn from it. The cache holds no routes.
        """
        known = len(self.tokens) - 1 if self.first_scored is None else self.first_scored
        return known if self.routes is None else min(known, self.num_routed)

    @property
    def num_routed(self) -> int:
        """How many of the first tokens have routes, or need none."""
        return self.first_routed + sum(map(len, self.routes or ()))

    def add_token(self, token: int) -> None:
        """Add a sampled token."""
        self.tokens.append(token)
        if self.edits is not None:
            self.edits.add(token)

    def add_routes(self, routes: NDArray[np.int16], start: int) -> None:
        """Add the routes of computed tokens from `start` on. A token that is computed again keeps its first ones."""
        if self.routes is not None and start + len(routes) > self.num_routed:
            self.routes.append(routes[self.num_routed - start :])


class TokenSpan(NamedTuple):
    """Tokens [start, stop) of a continuation, for the next pass.

    is_decode: it is one sampled token and does not depend on other spans of the pass.
    """

    continuation: Continuation
    start: int
    stop: int
    is_decode: bool = False

    @property
    def is_last(self) -> bool:
        """Whether the span ends with the newest token, so that the next one can be drawn."""
        return self.stop == len(self.continuation.tokens)


class SampleScheduler:
    """The queues of waiting continuations, one for each request, and the list of running ones.

    Each pass first takes the running continuations, each with its tokens that are not computed yet. Then it admits
    waiting continuations in order, but last those of requests that already run their share of `max_running`. Shares are
    equal, and at least MIN_SHARE. If blocks run out, the request that runs the most continuations loses the one
    admitted last: its blocks are released, and it moves to the front of its queue and later recomputes its tokens.
    Requests that run more than their share are preempted in the same way when others below their share have no room.

    Args:
        pool: the blocks.
        max_running: the maximum number of running continuations.
        max_tokens: the maximum number of tokens of one pass.
        max_adapters: the maximum number of different adapters of running continuations.
        root: the root of the keys of an adapter's blocks (None: the base's); it must change with the weights.
        shares_prefixes: whether tokens need not be computed if others with the same tokens before them are in the
            cache. Not so with recurrences: their states are only those after the newest token of each continuation.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_running: int,
        max_tokens: int,
        max_adapters: int,
        root: Callable[[str | None], bytes],
        shares_prefixes: bool = True,
    ) -> None:
        self._pool = pool
        self._shares_prefixes = shares_prefixes
        self._free_slots = list(reversed(range(max_running)))
        self._max_running = max_running
        self._max_tokens = max_tokens
        self._max_adapters = max_adapters
        self._root = root
        self.running: list[Continuation] = []
        self._waiting: OrderedDict[int, deque[Continuation]] = OrderedDict()

    def plan(self) -> list[TokenSpan]:
        """The spans of the next pass, with blocks reserved; empty only if no continuation waits or runs."""
        self._make_room()
        spans: list[TokenSpan] = []
        left = self._max_tokens
        for continuation in list(self.running):
            count = min(len(continuation.tokens) - continuation.num_cached, left)
            if continuation not in self.running or count == 0:
                continue
            # The preempted continuation was admitted later, so it has no span yet, and no span depends on blocks that
            # it would compute.
            while not self._reserve(continuation, continuation.num_cached + count):
                self.preempt(self._largest(self.running[self.running.index(continuation) :]))
                if continuation not in self.running:
                    break
            else:
                span = self._span(continuation, count)
                is_decode = continuation.num_sampled > 0 and count == 1 and span.is_last
                spans.append(span._replace(is_decode=is_decode))
                left -= count
        while left > 0 and self._waiting:
            request_id = self._next_request()
            queue = self._waiting[request_id]
            if not self._admit(queue[0]):
                break
            continuation = queue.popleft()
            if not queue:
                del self._waiting[request_id]
            self.running.append(continuation)
            continuation.slot = self._free_slots.pop()
            count = min(len(continuation.tokens) - continuation.num_cached, left)
            spans.append(self._span(continuation, count))
            left -= count
        return spans

    def add(self, continuations: Sequence[Continuation]) -> None:
        """Queue new continuations behind other continuations of the same request."""
        for continuation in continuations:
            self._waiting.setdefault(continuation.request_id, deque()).append(continuation)

    def preempt(self, continuation: Continuation) -> None:
        """Release the continuation's blocks and put it at the front of the queue."""
        self._leave(continuation)
        self._waiting.setdefault(continuation.request_id, deque()).appendleft(continuation)
        self._waiting.move_to_end(continuation.request_id, last=False)

    def remove(self, request_id: int) -> None:
        """Remove all continuations of a request."""
        for continuation in [one for one in self.running if one.request_id == request_id]:
            self._leave(continuation)
        self._waiting.pop(request_id, None)

    def finish(self, continuation: Continuation) -> None:
        """Remove a running continuation that has ended."""
        self._leave(continuation)

    def _share(self) -> int:
        """How many continuations of each request may run while others wait."""
        requests = {one.request_id for one in self.running} | self._waiting.keys()
        return max(self._max_running // len(requests), MIN_SHARE)

    def _num_running(self) -> Counter[int]:
        return Counter(one.request_id for one in self.running)

    def _next_request(self) -> int:
        """The request whose continuation is admitted next."""
        if len(self._waiting) == 1:
            return next(iter(self._waiting))
        share, num_running = self._share(), self._num_running()
        below = (request_id for request_id in self._waiting if num_running[request_id] < share)
        return next(below, next(iter(self._waiting)))

    def _largest(self, candidates: Sequence[Continuation]) -> Continuation:
        """The last admitted continuation of the request that runs the most."""
        num_running = self._num_running()
        return max(reversed(candidates), key=lambda one: num_running[one.request_id])

    def _make_room(self) -> None:
        """Preempt continuations of requests above their share, if requests below their share have no room."""
        if not self._waiting or not self.running:
            return
        share, num_running = self._share(), self._num_running()
        if num_running.most_common(1)[0][1] <= share:
            return
        slots, blocks = self._max_running - len(self.running), self._pool.num_unused
        for request_id, queue in list(self._waiting.items()):
            for continuation in list(islice(queue, max(share - num_running[request_id], 0))):
                slots, blocks = slots - 1, blocks - -(-len(continuation.tokens) // self._pool.block_size)
                while slots < 0 or blocks < 0:
                    victim = self._largest(self.running)
                    if num_running[victim.request_id] <= share:
                        return
                    num_running[victim.request_id] -= 1
                    slots, blocks = slots + 1, blocks + len(victim.blocks)
                    self.preempt(victim)

    def _leave(self, continuation: Continuation) -> None:
        self.running.remove(continuation)
        self._pool.release(continuation.blocks)
        continuation.blocks, continuation.keys, continuation.num_cached = [], [], 0
        assert continuation.slot is not None, "it has one while it runs"
        self._free_slots.append(continuation.slot)
        continuation.slot = None

    def _admit(self, continuation: Continuation) -> bool:
        """Reserve blocks for all tokens of a continuation if it may run now; returns whether it may."""
        running_adapters = {other.request.adapter for other in self.running} - {None}
        if len(self.running) >= self._max_running:
            return False
        if len(running_adapters | ({continuation.request.adapter} - {None})) > self._max_adapters:
            return False
        block_size = self._pool.block_size
        known = continuation.tokens[: continuation.num_shareable] if self._shares_prefixes else []
        keys = list(block_keys(known, block_size, self._root(continuation.request.adapter)))
        found = self._pool.find(keys)
        continuation.keys = keys[: len(found)]
        num_blocks = -(-len(continuation.tokens) // block_size)
        num_idle = sum(self._pool.is_unused(block) for block in found)
        if num_blocks - len(found) > self._pool.num_unused - num_idle:
            continuation.keys = []
            return False
        self._pool.share(found)
        continuation.blocks = found
        continuation.num_cached = len(found) * block_size
        if continuation.num_cache_hits is None:
            continuation.num_cache_hits = continuation.num_cached
        return self._reserve(continuation, len(continuation.tokens))

    def _reserve(self, continuation: Continuation, num_tokens: int) -> bool:
        """Reserve blocks for this number of tokens; returns False, without reserving any, if there are too few."""
        missing = -(-num_tokens // self._pool.block_size) - len(continuation.blocks)
        if missing > self._pool.num_unused:
            return False
        continuation.blocks += [self._pool.allocate() for _ in range(missing)]
        return True

    def _span(self, continuation: Continuation, count: int) -> TokenSpan:
        """The next tokens of a continuation. Sets the keys of blocks that they fill, so that others can share them."""
        start, stop = continuation.num_cached, continuation.num_cached + count
        size = self._pool.block_size
        for index in range(len(continuation.keys), stop // size):
            previous = continuation.keys[-1] if continuation.keys else self._root(continuation.request.adapter)
            key = next_key(previous, continuation.tokens[index * size : (index + 1) * size])
            continuation.keys.append(key)
            self._pool.set_key(continuation.blocks[index], key)
        return TokenSpan(continuation, start, stop)
