"""Worker processes of the data loaders: how they start and end, and which signals they ignore."""

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
os.register_at_fork(after_in_child=_workers.clear)  # they belong to the parent


def iterate(loader: DataLoader[Item]) -> Iterator[Item]:
    """Returns `iter(loader)` and makes sure that its workers end with this process.

    The loader needs `ignore_sigterm` as its worker_init_fn.
    """
    before = set(active_children())
    items = iter(loader)
    _workers.update(set(active_children()) - before)
    return items


def ignore_sigterm(_: int) -> None:
    """Ignores SIGTERM, which schedulers send to every process: the trainer needs batches until it has saved."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def identity(item: Item) -> Item:
    """A collate function for items that are already batches; a lambda could not be pickled."""
    return item


@atexit.register
def _kill_workers() -> None:
    # They ignore the SIGTERM that multiprocessing sends at exit.
    for worker in _workers:
        if worker.is_alive():
            worker.kill()
