"""CheckpointReads: tracks the checkpoints that workers are reading, so that none is moved or deleted meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from xorl.server.identifiers import CheckpointRef


class CheckpointReads:
    """Lets many readers read a checkpoint at once, or one caller pause its readers."""

    def __init__(self) -> None:
        self._reading = Counter[CheckpointRef]()
        self._paused: set[CheckpointRef] = set()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def reading(self, find: Callable[[], CheckpointRef | None]) -> AsyncIterator[CheckpointRef | None]:
        """Hold this while the workers read a checkpoint. Waits while reads of it are paused, then yields it.

        find: returns the checkpoint to read, which may change during a pause; None if there is none.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: find() not in self._paused)
            checkpoint = find()
            if checkpoint is not None:
                self._reading[checkpoint] += 1
        try:
            yield checkpoint
        finally:
            if checkpoint is not None:
                self._reading[checkpoint] -= 1
                async with self._changed:
                    self._changed.notify_all()

    @asynccontextmanager
    async def paused(self, checkpoint: CheckpointRef) -> AsyncIterator[None]:
        """Wait until nobody reads a checkpoint, and keep new readers out."""
        self._paused.add(checkpoint)
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._reading[checkpoint])
            yield
        finally:
            self._paused.discard(checkpoint)
            async with self._changed:
                self._changed.notify_all()
