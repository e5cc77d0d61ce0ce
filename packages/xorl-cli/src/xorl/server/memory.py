"""Returns freed memory to the system; otherwise, the heap would stay large after one large request."""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path

TRIM_EVERY_S = 5.0
# The interval doubles after a trim that returned nothing, up to this.
LONGEST_WAIT_S = 80.0
# Less than this is likely to be used again soon.
KEPT_BYTES = 32 * 2**20


async def return_freed_memory() -> None:
    """Trim the heap regularly if the process has grown, until cancelled.

    In each thread's arena, the allocator keeps freed memory that lies below a block in use, however much it is.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return  # not glibc
    smallest, wait_s = resident_bytes(), TRIM_EVERY_S
    while True:
        await asyncio.sleep(wait_s)
        if (before := resident_bytes()) > smallest + KEPT_BYTES:
            # In a thread: a trim takes some milliseconds for each 100 MB, and does not hold the GIL.
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
