"""FSDP2's collectives on copy engines, which leave a GPU's processors to what computes, over the GPUs of one host.

NCCL's run on processors that matrix products want at that time. Where ranks reach each other's memory, copy engines
move the bytes over NVLink instead, through windows of symmetric memory; processors only put a rank's own shard where
its peers read it, and add up gradients.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

# Of each of a window's halves. What is larger passes in pieces.
HALF_BYTES = 128 << 20
# Of a model's two windows, one to gather and one to reduce through.
WINDOW_BYTES = 2 * 2 * HALF_BYTES


class CopyEngineAllGather(AllGather):
    """FSDP2's all-gather over the ranks of `group`, for the units of one model, one after the other.

    Shards pass through a window of symmetric memory with two halves, taken in turn: once the ranks have met over one,
    each has read what it wanted of the other. Construction is collective; RuntimeError where memory cannot be mapped.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._window = symmetric_memory.empty(2, HALF_BYTES, dtype=torch.uint8, device=device)
        self._ranks = symmetric_memory.rendezvous(self._window, group)
        self._half = 0
        self._done = torch.cuda.Event()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Where FSDP2 has the shards put together; its own shard it puts there itself."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Complete `output_tensor` [ranks x n], in which `input_tensor` [n] is this rank's part, on the current stream.

        With async_op, which FSDP2 sets where a handle is asked for, NCCL gathers.
        """
        if async_op:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=True)
        rank, num_ranks = self._ranks.rank, self._ranks.world_size
        shards = output_tensor.view(torch.uint8).view(num_ranks, -1)
        assert input_tensor.data_ptr() == shards[rank].data_ptr()
        # Gathers may be asked for on different streams, but the window is one.
        self._done.wait()
        for begin in range(0, shards.shape[1], HALF_BYTES):
            pieces = shards[:, begin : begin + HALF_BYTES]
            size = pieces.shape[1]
            self._window[self._half, :size].copy_(pieces[rank])
            self._ranks.barrier()
            for step in range(1, num_ranks):
                # Each peer is read by one rank at a time.
                peer = (rank + step) % num_ranks
                pieces[peer].copy_(self._ranks.get_buffer(peer, (size,), torch.uint8, self._half * HALF_BYTES))
            self._half = 1 - self._half
        self._done.record()
        return None


class CopyEngineReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter over the ranks of `group`, for the units of one model: sums in fp32, in a fixed order.

    Gradients travel in `dtype`, their own, and are widened where they are added: the sums are those of gradients that
    were widened first, for half the bytes. Each rank writes what a peer is to have into that peer's window, whose two
    halves are taken in turn: once the ranks have met over one, each has added up what was in the other. Construction is
    collective; RuntimeError where memory cannot be mapped.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
        # The kernel's module needs Triton, which comes with torch wherever there are GPUs.
        from xorl.kernels.fused.widened_sum import widened_sum_  # noqa: PLC0415

        self._add_up = widened_sum_
        self._dtype = dtype
        self._window = symmetric_memory.empty(2, HALF_BYTES // dtype.itemsize, dtype=dtype, device=device)
        self._ranks = symmetric_memory.rendezvous(self._window, group)
        self._half = 0
        self._done = torch.cuda.Event()
        self._input: weakref.ref[Tensor] | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What FSDP2 puts gradients into, whole, and then, while that is alive, what their sum is to be in."""
        before = None if self._input is None else self._input()
        if before is not None and before.numel() == int(size[0]) * self._ranks.world_size:
            return torch.empty(*size, dtype=torch.float32, device=device)
        whole = torch.empty(*size, dtype=self._dtype, device=device)
        self._input = weakref.ref(whole)
        return whole

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        """`output_tensor` [n] = the sum over ranks of their `input_tensor` [ranks x n]'s part for this one."""
        assert op == dist.ReduceOp.SUM
        assert not async_op
        assert (input_tensor.dtype, output_tensor.dtype) == (self._dtype, torch.float32)
        rank, num_ranks = self._ranks.rank, self._ranks.world_size
        parts = input_tensor.view(num_ranks, -1)
        half = self._window.shape[1]
        # A place for each peer, aligned as copies and vector loads like it.
        place = half // (num_ranks - 1) // 64 * 64
        self._done.wait()
        for begin in range(0, parts.shape[1], place):
            size = min(place, parts.shape[1] - begin)
            for step in range(1, num_ranks):
                # Each peer is written to by one rank at a time, and has what comes from `step` ranks below in a place.
                peer = (rank + step) % num_ranks
                offset = self._half * half + (step - 1) * place
                there = self._ranks.get_buffer(peer, (size,), self._dtype, offset)
                there.copy_(parts[peer, begin : begin + size])
            self._ranks.barrier()
            arrived = self._window[self._half, : place * (num_ranks - 1)].view(num_ranks - 1, place)[:, :size]
            self._add_up(output_tensor[begin : begin + size], parts[rank, begin : begin + size], arrived)
            self._half = 1 - self._half
        self._done.record()
        return None


def copy_engines_reach(group: dist.ProcessGroup) -> bool:
    """Whether the ranks' current CUDA devices are several of one host, each open to the others. Collective."""
    if group.size() == 1:
        return False
    device = torch.device("cuda", torch.cuda.current_device())
    places: list[tuple[str, str]] = [("", "")] * group.size()
    place = (socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid))
    dist.all_gather_object(places, place, group=group)
    reached: list[bool] = [False] * group.size()
    dist.all_gather_object(reached, _reaches(device, places), group=group)
    return all(reached)


def _reaches(device: torch.device, places: Sequence[tuple[str, str]]) -> bool:
    """Whether the devices at `places`, which are host and device's name, are distinct, here, and open to `device`."""
    visible = {
        (socket.gethostname(), str(torch.cuda.get_device_properties(index).uuid)): index
        for index in range(torch.cuda.device_count())
    }
    if len(set(places)) < len(places) or not visible.keys() >= set(places):
        return False
    others = [visible[place] for place in places if visible[place] != device.index]
    return all(torch.cuda.can_device_access_peer(device, other) for other in others)
