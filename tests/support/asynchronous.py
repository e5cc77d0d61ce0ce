"""Tests that are coroutines, and what they wait for."""

import asyncio
import functools
from collections.abc import Callable, Coroutine

TIMEOUT_S = 60


def in_a_loop(test: Callable[..., Coroutine[object, object, None]]) -> Callable[..., None]:
    """The same test as a plain function, which runs it in a loop of its own for a minute at the most."""

    @functools.wraps(test)
    def run(*arguments: object, **fixtures: object) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **fixtures), TIMEOUT_S))

    return run


async def until(condition: Callable[[], object]) -> None:
    """Waits for what other tasks of the loop bring about."""
    while not condition():
        await asyncio.sleep(0.01)
