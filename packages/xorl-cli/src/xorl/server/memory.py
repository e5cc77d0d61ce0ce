"""Returns memory to the system that the process has freed, since a large request makes the heap grow for good."""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path

TRIM_EVERY_S = 5.0
# Up to this, the interval doubles after a trim that returned nothing.
LONGEST_WAIT_S = 80.0
# Less than this is soon used again.
KEPT_BYTES = 32 * 2**20


async def return_freed_memory() -> None:
    """Look every TRIM_EVERY_S whether the process has grown, and if so trim its heap, until cancelled.

    The allocator keeps what lies below any block in use, and in each thread's arena, however large it is.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return  # another libc than glibc
    smallest, wait_s = resident_bytes(), TRIM_EVERY_S
    while True:
        await asyncio.sleep(wait_s)
        if (before := resident_bytes()) > smallest + KEPT_BYTES:
            # In a thread: it takes some milliseconds for each 100 MB, without the interpreter's lock.
            await asyncio.to_thread(trim, 0)
            has_shrunk = resident_bytes() < before - 2**20
            wait_s = TRIM_EVERY_S if has_shrunk else min(2 * wait_s, LONGEST_WAIT_S)
        else:
            wait_s = TRIM_EVERY_S
        smallest = min(smallest, resident_bytes())


def resident_bytes() -> int:
    """The memory of this process, without what it shares with files."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
