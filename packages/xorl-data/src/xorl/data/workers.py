"""Functions that the workers of all loaders share."""

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
    """`iter(loader)`, whose workers start here and end with this process. Give it `leave_sigterm` as worker_init_fn."""
    before = set(active_children())
    items = iter(loader)
    _workers.update(set(active_children()) - before)
    return items


def leave_sigterm(_: int) -> None:
    """Ignores SIGTERM, which a job sends to all its processes: the trainer needs batches until it has saved."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def unchanged(item: Item) -> Item:
    """An identity collate function, for items that are batches already; it can be sent to a worker."""
    return item


@atexit.register
def _end() -> None:
    # SIGTERM, which multiprocessing sends at exit, would not end them.
    for worker in _workers:
        if worker.is_alive():
            worker.kill()
