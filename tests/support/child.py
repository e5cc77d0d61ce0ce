"""in_child: call a function in a process that is forked from this one, for code that leaves threads behind."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import IO, TypeVar

Answer = TypeVar("Answer")
CHILD_S = 120.0


def in_child(function: Callable[[], Answer]) -> Answer:
    """What it returns; fails with its traceback. The clients' threads end with it, and tests that fork go on safely."""
    context = get_context("fork")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryFile(mode="w+") as stacks:
        process = context.Process(target=_call, args=(function, theirs, stacks))
        process.start()
        theirs.close()
        try:
            assert ours.poll(CHILD_S), f"it does not end within {CHILD_S:g} s:\n{_stacks_of(process.pid, stacks)}"
            succeeded, answer = ours.recv()
        except EOFError:
            succeeded, answer = False, "it ended without a word"
        finally:
            process.join(1)
            process.kill()
    assert succeeded, answer
    return answer


def _call(function: Callable[[], object], answer: Connection, stacks: IO[str]) -> None:
    faulthandler.register(signal.SIGUSR1, file=stacks)
    try:
        answer.send((True, function()))
    except BaseException:  # noqa: BLE001  (whatever it is, the test says so)
        answer.send((False, traceback.format_exc()))


def _stacks_of(pid: int | None, stacks: IO[str]) -> str:
    assert pid is not None
    os.kill(pid, signal.SIGUSR1)
    time.sleep(1)
    stacks.seek(0)
    return stacks.read()
