"""Collectives outside the model: broadcast rank 0's bytes, gather values on rank 0, and agree on failures.

All of them use gloo, in host memory.
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

import torch
import torch.distributed as dist

from xorl.ckpt.ranks import all_gather_text

logger = logging.getLogger(__name__)

# How long a failed rank waits for the others to report. A rank that is blocked in a collective of the model, waiting
# for the failed one, never reports. The failed process then exits, its launcher ends the other ranks, and the workers
# are restarted.
GRACE_S = 60.0
EXIT_CODE = 70


class FailedElsewhere(RuntimeError):
    """Another rank failed in the operation that this rank completed."""


@dataclass
class Sum:
    """A number that each rank sets in the body of `all_or_none`; afterwards, the sum over all ranks."""

    number: int = 0


@contextmanager
def all_or_none(what: str) -> Iterator[Sum]:
    """Run the body; if it raised on any rank, raise on every rank: the rank's own error, or FailedElsewhere.

    Collective on exit. If some rank does not reach the exit, the failed process exits, since a rank cannot leave a
    collective that another has entered.
    """
    error: Exception | None = None
    total = Sum()
    try:
        yield total
    except Exception as caught:  # noqa: BLE001 - process boundary: the other ranks must learn of any error
        error = caught
    if dist.get_world_size() == 1:
        if error is not None:
            raise error
        return
    watchdog = None
    if error is not None:
        watchdog = threading.Timer(GRACE_S, _exit_process, (what, error))
        watchdog.daemon = True
        watchdog.start()
    sums = torch.tensor([error is not None, total.number], dtype=torch.int64)
    reports: list[str | None] = []
    try:
        dist.all_reduce(sums)
        num_failed, total.number = sums.tolist()
        if num_failed:
            reports = [json.loads(text) for text in all_gather_text(json.dumps(None if error is None else str(error)))]
    except RuntimeError as lost:
        # A rank has died. This is not a failure of the operation, so the client must not get it as a result.
        _exit_process(what, error or lost)
    if watchdog is not None:
        watchdog.cancel()
    if error is not None:
        raise error
    if num_failed:
        reasons = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(reports) if text is not None)
        raise FailedElsewhere(f"{what} failed on other ranks: {reasons}")


def _exit_process(what: str, error: Exception) -> NoReturn:
    logger.critical("event=ranks_parted what=%s error=%r", what, error)
    os._exit(EXIT_CODE)


def broadcast_bytes(data: bytes | None) -> bytes:
    """Collective: return rank 0's bytes on every rank. data: None on the other ranks."""
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


def gather_rows(values: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor] | None:
    """Collective: on rank 0, return the rows [sizes[rank], ...] of every rank; elsewhere, None.

    values: [sizes[this rank], ...] on any device; not of 16 bits. sizes: the same on every rank.
    """
    own = values.cpu()
    rank = dist.get_rank()
    assert len(own) == sizes[rank], "a rank computes the rows assigned to it"
    if dist.get_world_size() == 1:
        return [own]
    padded = torch.zeros((max(*sizes, 1), *own.shape[1:]), dtype=own.dtype)
    padded[: len(own)] = own
    received = [torch.empty_like(padded) for _ in sizes] if rank == 0 else None
    dist.gather(padded, received, dst=0)
    if received is None:
        return None
    return [rows[:size] for rows, size in zip(received, sizes, strict=True)]


def gather_numbers(numbers: Sequence[int]) -> list[list[int]]:
    """Collective: return the numbers of every rank on every rank. All ranks pass the same count of numbers."""
    own = torch.tensor(numbers, dtype=torch.int64)
    received = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(received, own)
    return [row.tolist() for row in received]
