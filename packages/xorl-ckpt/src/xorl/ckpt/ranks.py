"""Exchanges short texts and errors between ranks.

All functions use the default process group, or the one of `communicating_over`, and also work in a single process
without one. Texts are sent as byte tensors, so that no rank unpickles data from another.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist

from xorl.ckpt.errors import CheckpointError, CheckpointFailure

# Ranks wait for the slowest one to write its files; a rank that has died is noticed at once.
_BACKGROUND_TIMEOUT = timedelta(hours=6)
# Each thread has its own value.
_group: ContextVar[dist.ProcessGroup | None] = ContextVar("group", default=None)


@contextmanager
def communicating_over(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Within the block, this thread's exchanges use a gloo group of all ranks; None means the default group.

    Collectives of two threads must not share a group, because ranks could run them in different orders.
    """
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)


def background_group() -> dist.ProcessGroup | None:
    """A gloo group of all ranks for work in the background; None without a process group. Collective when new."""
    return _gloo_group(dist.group.WORLD) if is_distributed() else None


@lru_cache(maxsize=1)
def _gloo_group(_: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A new group, which belongs to the given default group."""
    group = dist.new_group(backend="gloo", timeout=_BACKGROUND_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group


def current_group() -> dist.ProcessGroup | None:
    """The group of `communicating_over` in this thread; None is the default group."""
    return _group.get()


def is_distributed() -> bool:
    """Whether the default process group is initialised."""
    return dist.is_available() and dist.is_initialized()


def this_rank() -> int:
    """The rank of this process; 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def num_ranks() -> int:
    """The world size; 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


def collective_device(preferred: torch.device | None = None) -> torch.device:
    """A device that the group's backends support: `preferred` if possible, else the CPU, else the GPU."""
    if not is_distributed():
        return preferred or torch.device("cpu")
    if current_group() is not None:
        return torch.device("cpu")
    backends = str(dist.get_backend_config())
    if preferred is not None and f"{preferred.type}:" in backends:
        return preferred
    if "cpu:" in backends:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def all_gather_text(text: str) -> list[str]:
    """Collective: the texts of all ranks, in rank order."""
    if not is_distributed():
        return [text]
    device = collective_device()
    data = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8)
    length = torch.tensor([len(text.encode())], dtype=torch.int64, device=device)
    lengths = [torch.empty_like(length) for _ in range(num_ranks())]
    dist.all_gather(lengths, length, group=current_group())
    sizes = [int(size.item()) for size in lengths]
    padded = torch.zeros(max(max(sizes), 1), dtype=torch.uint8, device=device)
    padded[: data.numel()].copy_(data)
    texts = [torch.empty_like(padded) for _ in range(num_ranks())]
    dist.all_gather(texts, padded, group=current_group())
    return [_decode(item, size) for item, size in zip(texts, sizes, strict=True)]


def broadcast_text(text: str) -> str:
    """Collective: the text of rank 0, on every rank."""
    if not is_distributed():
        return text
    device = collective_device()
    data = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8).to(device)
    length = torch.tensor([len(text.encode())], dtype=torch.int64, device=device)
    dist.broadcast(length, src=0, group=current_group())
    size = int(length.item())
    received = data if this_rank() == 0 else torch.zeros(max(size, 1), dtype=torch.uint8, device=device)
    dist.broadcast(received, src=0, group=current_group())
    return _decode(received, size)


def require_same(text: str, problem: str) -> None:
    """Collective: raise CheckpointError(problem) on every rank if the ranks pass different texts."""
    if len(set(all_gather_text(text))) > 1:
        raise CheckpointError(problem)


def any_rank_holds(held: list[bool]) -> list[bool]:
    """Collective: elementwise "or" over the ranks; the list must have the same length on every rank."""
    if not is_distributed() or not held:
        return held
    flags = torch.tensor(held, dtype=torch.int32, device=collective_device())
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=current_group())
    return [bool(flag) for flag in flags.tolist()]


@contextmanager
def fail_together(action: str) -> Iterator[None]:
    """Collective at the end of the block: if the block raises on any rank, every rank raises.

    `action` completes "could not ..." in the message. The block must not run a collective, because a rank that fails
    before it would leave the others waiting.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001  (the other ranks must learn of any error)
        error = caught
    raise_together(action, error)


def raise_together(action: str, error: Exception | None) -> None:
    """Collective: raise on every rank if any rank passes an error: a CheckpointError if all errors are of that type,
    otherwise a CheckpointFailure.
    """
    if num_ranks() == 1:
        if error is None:
            return
        if isinstance(error, (CheckpointError, CheckpointFailure)):
            raise error
        raise CheckpointFailure(f"could not {action}: {describe(error)}") from error
    report = {} if error is None else {"input": isinstance(error, CheckpointError), "text": describe(error)}
    reports = [json.loads(text) for text in all_gather_text(json.dumps(report))]
    failed = {rank: item for rank, item in enumerate(reports) if item}
    if not failed:
        return
    texts = {item["text"] for item in failed.values()}
    if len(texts) == 1 and (len(failed) == len(reports) or all(item["input"] for item in failed.values())):
        message = texts.pop()
    else:
        lines = [f"rank {rank}: {item['text']}" for rank, item in list(failed.items())[:4]]
        message = f"could not {action} on {len(failed)} of {len(reports)} ranks\n  " + "\n  ".join(lines)
    if all(item["input"] for item in failed.values()):
        raise CheckpointError(message) from error
    raise CheckpointFailure(message) from error


def describe(error: BaseException) -> str:
    """The error's message, preceded by its type unless it is one of this package's errors."""
    if isinstance(error, (CheckpointError, CheckpointFailure)):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _decode(data: torch.Tensor, size: int) -> str:
    return bytes(data[:size].cpu().numpy().tobytes()).decode()
