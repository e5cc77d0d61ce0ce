"""FSDP2 collectives on copy engines, for the GPUs of one host.

NCCL's kernels occupy streaming multiprocessors (SMs) that concurrent matrix products need. If ranks can access each
other's memory, copy engines move the data over NVLink instead, through windows of symmetric memory. SMs then only copy
a rank's own shard, and sum gradients. Parameters are gathered straight into the memory that the model reads, not into a
buffer from which FSDP2 would copy them.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from xorl.core.torch_private import AllGather, ReduceScatter, symmetric_memory
from xorl.kernels.torch_private import foreach_copy_

# The size of one half of a window. Larger transfers are split into pieces.
HALF_BYTES = 128 << 20
# Segments in a window start at multiples of this, for copies and vector loads.
ALIGNMENT = 256
# The total size of a model's two windows, one for gathering and one for reducing.
WINDOW_BYTES = 2 * 2 * HALF_BYTES


class CopyEngineAllGather(AllGather):
    """FSDP2's all-gather over the ranks of `group`, for the units of one model, one at a time.

    Shards pass through a window of symmetric memory with two halves, used alternately: the barrier for one half
    guarantees that all ranks have finished reading the other. Construction is collective, and raises RuntimeError if
    memory cannot be mapped.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._window = symmetric_memory.empty(2, HALF_BYTES, dtype=torch.uint8, device=device)
        self._peers = symmetric_memory.rendezvous(self._window, group)
        self._half = 0
        self._done = torch.cuda.Event()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The output buffer. FSDP2 copies this rank's shard into its part of the buffer itself."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather all ranks' `input_tensor` [n] into `output_tensor` [ranks x n], on the current stream.

        `input_tensor` must be this rank's part of `output_tensor`. With async_op, the caller needs a handle, so NCCL
        gathers instead.
        """
        assert group == self._group, "the window is shared with the ranks of another group"
        if async_op:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=True)
        assert input_tensor.data_ptr() == output_tensor.chunk(self._peers.world_size)[self._peers.rank].data_ptr()
        self.gather_into([output_tensor])([input_tensor])
        return None

    def gather_into(self, wholes: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], None]:
        """A function that gathers all ranks' shards of some tensors, each flat [n], on the current stream.

        wholes: where the shards of all ranks go, each [ranks x n]; shards are converted to the dtype of their tensor.
            Its memory may be freed and allocated again between calls of the function.
        """
        parts = [whole.view(torch.uint8).view(self._peers.world_size, -1) for whole in wholes]
        dtypes = [whole.dtype for whole in wholes]
        pieces = [
            (segments, [self._copies(half, segments, parts, dtypes) for half in (0, 1)])
            for segments in pieces_of([part.shape[1] for part in parts])
        ]

        def gather(shards: Sequence[Tensor]) -> None:
            # Gathers may run on different streams but share one window.
            self._done.wait()
            for segments, copies_of_halves in pieces:
                copies = copies_of_halves[self._half]
                own = [one.of(shards[one.tensor], dtypes[one.tensor]) for one in segments]
                foreach_copy_(copies.sent, own)
                if own[0].data_ptr() != copies.kept[0].data_ptr():
                    foreach_copy_(copies.kept, copies.sent)
                self._peers.barrier()
                for target, source in copies.received:
                    target.copy_(source)
                self._half = 1 - self._half
            self._done.record()

        return gather

    def _copies(
        self, half: int, segments: Sequence[Segment], parts: Sequence[Tensor], dtypes: Sequence[torch.dtype]
    ) -> Copies:
        """parts: for each tensor, the bytes of each rank's part [ranks, n]."""
        rank, num_ranks = self._peers.rank, self._peers.world_size
        # In each step, every peer is read by one rank only.
        peers = [(rank + step) % num_ranks for step in range(1, num_ranks)]
        return Copies(
            [self._window[half, one.offset :][: one.size].view(dtypes[one.tensor]) for one in segments],
            [parts[one.tensor][rank, one.start :][: one.size].view(dtypes[one.tensor]) for one in segments],
            [
                (
                    parts[one.tensor][peer, one.start :][: one.size],
                    self._peers.get_buffer(peer, (one.size,), torch.uint8, half * HALF_BYTES + one.offset),
                )
                for peer in peers
                for one in segments
            ],
        )


class Segment(NamedTuple):
    """A part of the shard of a tensor, in bytes, and where it is in a half of a window."""

    tensor: int
    start: int
    size: int
    offset: int

    def of(self, shard: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of this part, which is of `dtype` in the window."""
        return shard[self.start // dtype.itemsize :][: self.size // dtype.itemsize]


class Copies(NamedTuple):
    """The copies of some segments: into this rank's window, from there to their places, and from the peers' windows."""

    sent: list[Tensor]
    kept: list[Tensor]
    received: list[tuple[Tensor, Tensor]]


def pieces_of(sizes: Sequence[int]) -> list[list[Segment]]:
    """The bytes of several shards as pieces, each of which fits into half of a window."""
    pieces: list[list[Segment]] = [[]]
    used = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            if used >= HALF_BYTES:
                pieces.append([])
                used = 0
            segment = Segment(index, start, min(size - start, HALF_BYTES - used), used)
            pieces[-1].append(segment)
            start += segment.size
            used += -(-segment.size // ALIGNMENT) * ALIGNMENT
    return pieces


class CopyEngineReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter over the ranks of `group`, for the units of one model: sums in fp32, in a fixed order.

    Gradients are sent in their own `dtype` and converted to fp32 when they are summed. This gives the same result as
    converting them first, with half the traffic. Each rank writes into the windows of its peers. The two halves of a
    window are used alternately: the barrier for one half guarantees that all ranks have summed the contents of the
    other.
    Construction is collective, and raises RuntimeError if memory cannot be mapped.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
        # This module needs Triton, which torch includes on GPU platforms.
        from xorl.kernels.fused.widened_sum import widened_sum_  # noqa: PLC0415

        self._sum_ = widened_sum_
        self._group = group
        self._dtype = dtype
        self._window = symmetric_memory.empty(2, HALF_BYTES // dtype.itemsize, dtype=dtype, device=device)
        self._peers = symmetric_memory.rendezvous(self._window, group)
        self._half = 0
        self._done = torch.cuda.Event()
        self._input: weakref.ref[Tensor] | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The input buffer for unreduced gradients or, if that is alive already, the output buffer of its reduction."""
        unreduced = None if self._input is None else self._input()
        if unreduced is not None and unreduced.numel() == int(size[0]) * self._peers.world_size:
            return torch.empty(*size, dtype=torch.float32, device=device)
        unreduced = torch.empty(*size, dtype=self._dtype, device=device)
        self._input = weakref.ref(unreduced)
        return unreduced

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Set `output_tensor` [n] to the sum over all ranks of this rank's part of their `input_tensor` [ranks x n]."""
        assert group == self._group, "the window is shared with the ranks of another group"
        assert op == dist.ReduceOp.SUM
        assert not async_op
        assert (input_tensor.dtype, output_tensor.dtype) == (self._dtype, torch.float32)
        rank, num_ranks = self._peers.rank, self._peers.world_size
        parts = input_tensor.view(num_ranks, -1)
        half_size = self._window.shape[1]
        # One slot for each peer, aligned for copies and vector loads.
        slot_size = half_size // (num_ranks - 1) // 64 * 64
        self._done.wait()
        for start in range(0, parts.shape[1], slot_size):
            size = min(slot_size, parts.shape[1] - start)
            for step in range(1, num_ranks):
                # In each step, every peer is written to by one rank only, in the slot for the rank `step` below it.
                peer = (rank + step) % num_ranks
                offset = self._half * half_size + (step - 1) * slot_size
                remote = self._peers.get_buffer(peer, (size,), self._dtype, offset)
                remote.copy_(parts[peer, start : start + size])
            self._peers.barrier()
            received = self._window[self._half, : slot_size * (num_ranks - 1)].view(num_ranks - 1, slot_size)[:, :size]
            self._sum_(output_tensor[start : start + size], parts[rank, start : start + size], received)
            self._half = 1 - self._half
        self._done.record()
        return None


def can_use_copy_engines(group: dist.ProcessGroup) -> bool:
    """Whether the ranks' CUDA devices are distinct GPUs of one host that can access each other. Collective."""
    if group.size() == 1:
        return False
    device = torch.device("cuda", torch.cuda.current_device())
    devices: list[tuple[str, str]] = [("", "")] * group.size()
    mine = (socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid))
    dist.all_gather_object(devices, mine, group=group)
    accessible: list[bool] = [False] * group.size()
    dist.all_gather_object(accessible, _can_access_all(device, devices), group=group)
    return all(accessible)


def _can_access_all(device: torch.device, devices: Sequence[tuple[str, str]]) -> bool:
    """Whether `devices`, as (host name, UUID), are distinct, on this host, and accessible from `device`."""
    visible = {
        (socket.gethostname(), str(torch.cuda.get_device_properties(index).uuid)): index
        for index in range(torch.cuda.device_count())
    }
    if len(set(devices)) < len(devices) or not visible.keys() >= set(devices):
        return False
    others = [visible[other] for other in devices if visible[other] != device.index]
    return all(torch.cuda.can_device_access_peer(device, other) for other in others)
