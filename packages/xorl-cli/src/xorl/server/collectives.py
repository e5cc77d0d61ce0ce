"""What ranks exchange beside the model: rank 0's bytes for all, every rank's values for rank 0, and failures.

Everything travels by gloo, in host memory.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from xorl.ckpt.ranks import all_gather_text

logger = logging.getLogger(__name__)

# How long a rank that has failed waits for the others to report. A rank that waits for it in a collective of the model
# never reports: then this process exits, its launcher ends the rest, and the workers start anew.
GRACE_S = 60.0
EXIT_CODE = 70


class FailedElsewhere(RuntimeError):
    """Another rank failed in what this one did."""


@dataclass
class Sum:
    """A number that each rank adds to in the body of `all_or_none`; after it, what all of them have added."""

    number: int = 0


@contextmanager
def all_or_none(what: str) -> Iterator[Sum]:
    """Collective at its end: if the body raised on any rank, raise on every rank, its own error or FailedElsewhere.

    If the ranks do not reach that end together, the process exits: nothing can go on after half a collective.
    """
    error: Exception | None = None
    total = Sum()
    try:
        yield total
    except Exception as caught:  # noqa: BLE001 - a rank is a process: the others must be told, whatever it was
        error = caught
    if dist.get_world_size() == 1:
        if error is not None:
            raise error
        return
    watchdog = None if error is None else _end_unless_cancelled(what, error)
    sums = torch.tensor([error is not None, total.number], dtype=torch.int64)
    reports: list[str | None] = []
    try:
        dist.all_reduce(sums)
        num_failed, total.number = sums.tolist()
        if num_failed:
            reports = [json.loads(text) for text in all_gather_text(json.dumps(None if error is None else str(error)))]
    except RuntimeError as parted:
        # A rank is gone. That is no failure of the operation that a client should be told of.
        _end(what, error or parted)
    if watchdog is not None:
        watchdog.cancel()
    if error is not None:
        raise error
    if num_failed:
        told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(reports) if text is not None)
        raise FailedElsewhere(f"{what} failed on other ranks: {told}")


def _end_unless_cancelled(what: str, error: Exception) -> threading.Timer:
    watchdog = threading.Timer(GRACE_S, _end, (what, error))
    watchdog.daemon = True
    watchdog.start()
    return watchdog


def _end(what: str, error: Exception) -> NoReturn:
    logger.critical("event=ranks_parted what=%s error=%r", what, error)
    os._exit(EXIT_CODE)


def broadcast_bytes(data: bytes | None) -> bytes:
    """Collective: the bytes of rank 0 (None elsewhere), on every rank."""
    if dist.get_world_size() == 1:
        assert data is not None
        return data
    size = torch.tensor([0 if data is None else len(data)], dtype=torch.int64)
    dist.broadcast(size, src=0)
    num_bytes = int(size.item())
    if num_bytes == 0:
        return b""
    buffer = (
        torch.empty(num_bytes, dtype=torch.uint8)
        if data is None
        else torch.frombuffer(bytearray(data), dtype=torch.uint8)
    )
    dist.broadcast(buffer, src=0)
    return buffer.numpy().tobytes() if data is None else data


def gather_rows(values: torch.Tensor, sizes: Sequence[int]) -> list[NDArray[np.float32]] | None:
    """Collective: the rows [sizes[rank], ...] of every rank, on rank 0; None elsewhere. All know all sizes.

    values: [sizes[this rank], ...] fp32 on any device.
    """
    own = values.cpu()
    rank = dist.get_rank()
    assert len(own) == sizes[rank], "what a rank computes is what it was dealt"
    if dist.get_world_size() == 1:
        return [own.numpy()]
    padded = torch.zeros((max(*sizes, 1), *own.shape[1:]), dtype=torch.float32)
    padded[: len(own)] = own
    received = [torch.empty_like(padded) for _ in sizes] if rank == 0 else None
    dist.gather(padded, received, dst=0)
    if received is None:
        return None
    return [rows[:size].numpy() for rows, size in zip(received, sizes, strict=True)]


def gather_numbers(numbers: Sequence[int]) -> list[list[int]]:
    """Collective: the numbers of every rank, on every rank; as many on each."""
    own = torch.tensor(numbers, dtype=torch.int64)
    received = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(received, own)
    return [row.tolist() for row in received]
