"""The scheduler: which tokens of which samples the next pass takes; admission, blocks, preemption. Knows no model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xorl.server.sampler.blocks import BlockPool, block_keys, next_key
from xorl.server.sampler.request import SampleRequest


@dataclass(eq=False)
class Continuation:
    """One sample of a request as it grows: its tokens, and how many of them are in the cache."""

    request_id: int
    index: int
    request: SampleRequest
    tokens: list[int]
    # Scoring the prompt needs the hidden states of all its tokens, which the cache does not hold.
    scores_prompt: bool
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    num_cached: int = 0
    num_found: int | None = None
    logprobs: list[float] = field(default_factory=list)
    tops: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


class Piece(NamedTuple):
    """Tokens [start, stop) of a continuation, for the next pass.

    grows: it is one sampled token and depends on nothing else in the pass.
    """

    continuation: Continuation
    start: int
    stop: int
    grows: bool = False

    @property
    def is_last(self) -> bool:
        """Whether the pass ends with the newest token, so that the next one can be drawn."""
        return self.stop == len(self.continuation.tokens)


class Schedule:
    """The waiting and the running continuations.

    Running ones go first, each with its tokens that are not computed; then waiting ones are admitted in order, without
    overtaking. If blocks run out, the last admitted one is preempted: its blocks are released, and it waits as the
    first, to recompute its tokens.

    Args:
        pool: the blocks.
        max_running: continuations at once.
        max_tokens: of one pass.
        max_adapters: different ones among those that run.
        root: the start of the keys of an adapter's blocks (None is the base); it changes with the weights.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_running: int,
        max_tokens: int,
        max_adapters: int,
        root: Callable[[str | None], bytes],
    ) -> None:
        self._pool = pool
        self._max_running = max_running
        self._max_tokens = max_tokens
        self._max_adapters = max_adapters
        self._root = root
        self.running: list[Continuation] = []
        self.waiting: deque[Continuation] = deque()

    def plan(self) -> list[Piece]:
        """The pieces of the next pass, with blocks for all of them; empty only if nothing waits or runs."""
        pieces: list[Piece] = []
        left = self._max_tokens
        for continuation in list(self.running):
            count = min(len(continuation.tokens) - continuation.num_cached, left)
            if continuation not in self.running or count == 0:
                continue
            # A preempted one was admitted later, so it has no piece yet, and no piece relies on blocks it would have
            # computed.
            while not self._reserve(continuation, continuation.num_cached + count):
                self.retract(self.running[-1])
                if continuation not in self.running:
                    break
            else:
                piece = self._piece(continuation, count)
                grows = continuation.num_sampled > 0 and count == 1 and piece.is_last
                pieces.append(piece._replace(grows=grows))
                left -= count
        while left > 0 and self.waiting and self._admit(self.waiting[0]):
            continuation = self.waiting.popleft()
            self.running.append(continuation)
            count = min(len(continuation.tokens) - continuation.num_cached, left)
            pieces.append(self._piece(continuation, count))
            left -= count
        return pieces

    def retract(self, continuation: Continuation) -> None:
        """Preempt: release its blocks and let it wait, as the first."""
        self._leave(continuation)
        self.waiting.appendleft(continuation)

    def retract_all(self) -> None:
        """Preempt all; they wait in the same order."""
        for continuation in reversed(list(self.running)):
            self.retract(continuation)

    def remove(self, continuation: Continuation) -> None:
        """Remove a finished or cancelled continuation."""
        if continuation in self.running:
            self._leave(continuation)
        elif continuation in self.waiting:
            self.waiting.remove(continuation)

    def _leave(self, continuation: Continuation) -> None:
        self.running.remove(continuation)
        self._pool.release(continuation.blocks)
        continuation.blocks, continuation.keys, continuation.num_cached = [], [], 0

    def _admit(self, continuation: Continuation) -> bool:
        """Whether it may run now; if so, it gets blocks for all its tokens."""
        running_adapters = {other.request.adapter for other in self.running} - {None}
        if len(self.running) >= self._max_running:
            return False
        if len(running_adapters | ({continuation.request.adapter} - {None})) > self._max_adapters:
            return False
        block_size = self._pool.block_size
        found: list[int] = []
        if not continuation.scores_prompt:
            # The last token is always computed, since the next one is drawn from it.
            known = continuation.tokens[:-1]
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
        if continuation.num_found is None:
            continuation.num_found = continuation.num_cached
        return self._reserve(continuation, len(continuation.tokens))

    def _reserve(self, continuation: Continuation, num_tokens: int) -> bool:
        """Reserve blocks for this number of tokens; False, without taking any, if there are too few."""
        missing = -(-num_tokens // self._pool.block_size) - len(continuation.blocks)
        if missing > self._pool.num_unused:
            return False
        continuation.blocks += [self._pool.take() for _ in range(missing)]
        return True

    def _piece(self, continuation: Continuation, count: int) -> Piece:
        """The next tokens of a continuation. Blocks that they fill get keys, so that others find them from now on."""
        start, stop = continuation.num_cached, continuation.num_cached + count
        size = self._pool.block_size
        for index in range(len(continuation.keys), stop // size):
            previous = continuation.keys[-1] if continuation.keys else self._root(continuation.request.adapter)
            key = next_key(previous, continuation.tokens[index * size : (index + 1) * size])
            continuation.keys.append(key)
            self._pool.name(continuation.blocks[index], key)
        return Piece(continuation, start, stop)
