"""Memory that a large request leaves behind."""

import asyncio

from asynchronous import in_a_loop
from xorl.server import memory


@in_a_loop
async def test_freed_memory_goes_back_to_the_system(monkeypatch):
    """Catches a process that stays as large as its largest request, since a small block lies above what was freed."""
    monkeypatch.setattr(memory, "TRIM_EVERY_S", 0.05)
    returning = asyncio.create_task(memory.return_freed_memory())
    await asyncio.sleep(0.1)
    blocks = [bytes([1]) * 2**16 for _ in range(2**11)]
    above = bytes([1]) * 2**16
    largest = memory.resident_bytes()
    del blocks
    for _ in range(100):
        await asyncio.sleep(0.05)
        if memory.resident_bytes() < largest - 2**26:
            break
    assert memory.resident_bytes() < largest - 2**26
    assert len(above) == 2**16
    returning.cancel()
