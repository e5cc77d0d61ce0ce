"""What the workers of all loaders have in common."""

import atexit
import os
import signal
from collections.abc import Iterator
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import TypeVar
from weakref import WeakSet

from torch.utils.data import DataLoader

Item = TypeVar("Item")

_workers: WeakSet[BaseProcess] = WeakSet()
os.register_at_fork(after_in_child=_workers.clear)  # they are the parent's


def begin(loader: DataLoader[Item]) -> Iterator[Item]:
    """`iter(loader)`, whose workers start here and end with this process; it takes `leave_sigterm` to begin them."""
    before = set(active_children())
    items = iter(loader)
    _workers.update(set(active_children()) - before)
    return items


def leave_sigterm(_: int) -> None:
    """Let a SIGTERM to all processes of a job be the trainer's matter, which needs batches until it has saved."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def unchanged(item: Item) -> Item:
    """To collate with, where items are batches already; a function that can be sent to a worker."""
    return item


@atexit.register
def _end() -> None:
    # By SIGTERM, as multiprocessing ends what is still there, they would not.
    for worker in _workers:
        if worker.is_alive():
            worker.kill()
