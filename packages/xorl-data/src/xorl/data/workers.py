"""Worker processes of the data loaders: how they start and end, and which signals they ignore."""

import atexit
import os
import signal
from collections.abc import Iterable, Iterator
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import TypeVar
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader, Dataset

from xorl.data.orphans import exit_with_parent
from xorl.data.packing import StartMethod

Item = TypeVar("Item")

_workers: WeakSet[BaseProcess] = WeakSet()
os.register_at_fork(after_in_child=_workers.clear)  # they belong to the parent


def iterate(
    dataset: Dataset[Item],
    *,
    num_workers: int,
    sampler: Iterable[object] | None = None,
    prefetch_factor: int = 2,
    pin_memory: bool = False,
    start_method: StartMethod | None = None,
) -> Iterator[Item]:
    """Iterates over the items of `dataset`, computed in `num_workers` processes, or in this one if 0.

    The processes end with the iterator, even if it is closed early, and with this process.
    """
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        collate_fn=_identity,
        worker_init_fn=_become_worker,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor if num_workers else None,
        pin_memory=pin_memory,
        multiprocessing_context=start_method if num_workers else None,
        # Otherwise the iterator would draw from the global generator, whose state is part of a checkpoint.
        generator=torch.Generator(),
    )
    before = set(active_children())
    items = iter(loader)
    _workers.update(set(active_children()) - before)
    return items


def _become_worker(_: int) -> None:
    """Ignores what schedulers send to every process: the trainer needs batches until it has saved."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    exit_with_parent()


def _identity(item: Item) -> Item:
    """The collate function, because items need none; a lambda could not be pickled."""
    return item


@atexit.register
def _kill_workers() -> None:
    # They ignore the SIGTERM that multiprocessing sends at exit.
    for worker in _workers:
        if worker.is_alive():
            worker.kill()
