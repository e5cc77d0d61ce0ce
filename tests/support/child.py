"""in_child and in_a_child: run a function, or a test, in a forked process, for code that leaves threads behind."""

import faulthandler
import functools
import importlib
import importlib.util
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import IO, TypeVar

from xorl.host.alive import STACKS_SIGNAL

Answer = TypeVar("Answer")
CHILD_S = 120.0
CLIENTS = ("tinker", "xorl_client")


def in_child(function: Callable[[], Answer]) -> Answer:
    """Return what the function returns; fail with its traceback, or with its stacks if it does not end.

    The threads of public clients end with the process, so later tests can fork safely.
    """
    # Each child would import them anew. They start no thread before they are used.
    for name in CLIENTS:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
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


def in_a_child(test: Callable[..., None]) -> Callable[..., None]:
    """The same test, all of it in such a process."""

    @functools.wraps(test)
    def run(**fixtures: object) -> None:
        in_child(functools.partial(test, **fixtures))

    return run


def _call(function: Callable[[], object], answer: Connection, stacks: IO[str]) -> None:
    faulthandler.register(STACKS_SIGNAL, file=stacks)
    try:
        answer.send((True, function()))
    except BaseException:  # noqa: BLE001  (whatever it is, the test says so)
        answer.send((False, traceback.format_exc()))


def _stacks_of(pid: int | None, stacks: IO[str]) -> str:
    """What the process writes to the file when it is asked for the stacks of its threads."""
    assert pid is not None
    os.kill(pid, STACKS_SIGNAL)
    time.sleep(1)
    stacks.seek(0)
    return stacks.read()
