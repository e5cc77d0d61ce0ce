"""Copies the tensors of a state to host memory, so that they can be written while the state changes.

Only this rank's part of a tensor is copied. On a GPU, the copies run on a stream of their own, beside the passes that
follow; the next change of the state must wait for them.
"""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from xorl.ckpt.errors import CheckpointFailure
from xorl.ckpt.regions import Stored, local_tensor, with_local

# Parts start at multiples of this many bytes, which suits every dtype.
_ALIGNMENT = 64


class HostMemory:
    """Memory that each snapshot is copied into; page-locked if the tensors are on a GPU.

    It grows to the largest snapshot. torch's own page-locked memory would be rounded up to a power of two, and never
    returned to the system.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._is_pinned = False

    def reserve(self, num_bytes: int, *, pinned: bool) -> mmap.mmap:
        """At least `num_bytes`; their content is lost. Raises CheckpointFailure if there is not enough memory."""
        if self._memory is not None and len(self._memory) >= num_bytes and (self._is_pinned or not pinned):
            return self._memory
        self.free()
        try:
            # Shared with forked processes, such as loader workers: a private page would be copied when it is written
            # after a fork, and the device would go on writing to the old one.
            self._memory = mmap.mmap(-1, max(num_bytes, 1))
            if pinned:
                self._pin(self._memory)
        except (OSError, RuntimeError) as error:
            self.free()
            raise CheckpointFailure(
                f"saving in the background needs {num_bytes / 2**30:.1f} GiB of host memory on each rank ({error}); "
                "save without save_async"
            ) from error
        return self._memory

    def free(self) -> None:
        """Return the memory to the system. No snapshot may be in use."""
        if self._is_pinned and self._memory is not None:
            from xorl.ckpt.torch_private import unpin_memory  # noqa: PLC0415 - imports DCP, which takes a second

            unpin_memory(_address(self._memory))
        self._memory, self._is_pinned = None, False

    def _pin(self, memory: mmap.mmap) -> None:
        from xorl.ckpt.torch_private import pin_memory  # noqa: PLC0415 - imports DCP, which takes a second

        pin_memory(_address(memory), len(memory))
        self._is_pinned = True


@dataclass(frozen=True)
class Snapshot:
    """Tensors in host memory, sharded like the originals; on a GPU, valid once `wait` returns."""

    tensors: dict[str, Stored]
    copied: torch.cuda.Event | None

    def wait(self) -> None:
        """Make the host wait for the copies."""
        if self.copied is not None:
            self.copied.synchronize()

    def before_change(self) -> None:
        """Make the work that is queued on the current stream from now on wait for the copies; the host does not."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)


def reserve_for(tensors: Mapping[str, Stored], memory: HostMemory) -> mmap.mmap:
    """Reserve memory for a snapshot of `tensors`; see `HostMemory.reserve`."""
    parts = [local_tensor(tensor) for tensor in tensors.values()]
    return memory.reserve(sum(map(_aligned, parts)), pinned=any(part.is_cuda for part in parts))


@torch.no_grad()
def take_snapshot(tensors: Mapping[str, Stored], memory: HostMemory) -> Snapshot:
    """Queue the copies of this rank's parts of `tensors`; see `Snapshot`."""
    parts = {name: local_tensor(tensor) for name, tensor in tensors.items()}
    on_gpu = [part.device for part in parts.values() if part.is_cuda]
    held = reserve_for(tensors, memory)
    copies: dict[str, torch.Tensor] = {}
    start = 0
    for name, part in parts.items():
        # Each copy has a storage of its own: DCP would clone a view of a larger one before it writes it.
        flat = torch.empty(0, dtype=part.dtype)
        if part.numel():
            flat = torch.frombuffer(held, dtype=part.dtype, count=part.numel(), offset=start)
        copies[name] = flat.view(part.shape)
        start += _aligned(part)
    copied = None
    if on_gpu:
        stream = torch.cuda.Stream(on_gpu[0])
        stream.wait_stream(torch.cuda.current_stream(on_gpu[0]))
        with torch.cuda.stream(stream):
            for name, part in parts.items():
                copies[name].copy_(part, non_blocking=True)
                if part.is_cuda:
                    part.record_stream(stream)
            copied = torch.cuda.Event()
            copied.record(stream)
    else:
        for name, part in parts.items():
            copies[name].copy_(part)
    return Snapshot({name: with_local(tensors[name], copy) for name, copy in copies.items()}, copied)


def _aligned(part: torch.Tensor) -> int:
    return -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
