"""Signs of life: files that processes touch while they work, so that the process that started them notices a hang."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Makes a process with an AliveFile print the stacks of all its threads, even if native code holds the GIL.
STACKS_SIGNAL = signal.SIGUSR2
TOUCH_EVERY_S = 1.0


class AliveFile:
    """The file of this process. It contains the process's id."""

    def __init__(self, path: Path) -> None:
        self._path = path
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(str(os.getpid()))
        temporary.replace(path)
        faulthandler.register(STACKS_SIGNAL, all_threads=True)

    def touch(self) -> None:
        """Give a sign of life. Does nothing once the folder is gone, since nobody looks at the file any more."""
        with suppress(OSError):
            os.utime(self._path)

    @contextmanager
    def touching(self) -> Iterator[None]:
        """Give signs of life from a thread until the block ends, also while the main thread waits in native code."""
        ended = threading.Event()

        def touch() -> None:
            while not ended.wait(TOUCH_EVERY_S):
                self.touch()

        thread = threading.Thread(target=touch, name="xorl-alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    async def keep_touching(self) -> None:
        """Give signs of life as long as the event loop runs."""
        while True:
            self.touch()
            await asyncio.sleep(TOUCH_EVERY_S)


class AwakeClock:
    """Counts seconds, except those during which this process itself was stopped.

    Otherwise, after a terminal or a scheduler stops and continues a job, its processes would all seem silent. `now`
    must be called at least every `max_gap_s` seconds; a longer gap counts as one of `max_gap_s`.
    """

    def __init__(self, max_gap_s: float) -> None:
        self._max_gap_s = max_gap_s
        self._now = 0.0
        self._last_s = time.monotonic()

    def now(self) -> float:
        """The seconds since this clock was made."""
        at = time.monotonic()
        self._now += min(at - self._last_s, self._max_gap_s)
        self._last_s = at
        return self._now
