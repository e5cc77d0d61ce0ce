"""Measures how much storage output_dir takes, for the status, the metrics and clients."""

from __future__ import annotations

import asyncio
import logging
import time

from xorl.server.orchestrator import catalogue
from xorl.server.orchestrator.options import OrchestratorOptions
from xorl.server.status_queries import Storage, StoredKind

logger = logging.getLogger(__name__)

# Measuring reads the size of every file, which takes seconds for many checkpoints on a network file system.
MAX_AGE_S = 5.0
# How long the status waits for a storage measurement.
STATUS_WAIT_S = 0.5


class StorageMeter:
    """Measures the storage at most every MAX_AGE_S, in a thread; simultaneous readers share a measurement."""

    def __init__(self) -> None:
        self._last: tuple[float, list[StoredKind]] | None = None
        self._measuring: asyncio.Task[None] | None = None

    async def read(self, options: OrchestratorOptions, wait_s: float | None = None) -> Storage | None:
        """The storage used, measured at most MAX_AGE_S ago; after `wait_s`, the last measurement if there is one."""
        if self._last is None or time.monotonic() - self._last[0] > MAX_AGE_S:
            if self._measuring is None or self._measuring.done():
                self._measuring = asyncio.create_task(self._measure(options))
            await asyncio.wait([self._measuring], timeout=wait_s)
        return None if self._last is None else Storage(options.storage_limit_bytes, self._last[1])

    async def _measure(self, options: OrchestratorOptions) -> None:
        started = time.monotonic()
        try:
            self._last = (started, await asyncio.to_thread(catalogue.measure, options.folder))
        except OSError as problem:
            # A checkpoint may have been deleted meanwhile; the next reader measures again.
            logger.warning("event=storage_not_measured why=%r", str(problem))
