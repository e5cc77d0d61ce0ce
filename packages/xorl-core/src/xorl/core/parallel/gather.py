"""All-gathers that leave a GPU's processors to what computes: shards of the GPUs of one host come by copy engines.

NCCL's all-gather runs on processors that matrix products want at that time. Where ranks reach each other's memory, a
copy engine reads a peer's shard over NVLink instead; processors only put a rank's own where its peers can read it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

# Of each of the window's halves. A larger shard passes in pieces.
HALF_BYTES = 128 << 20


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


def copy_engine_all_gather(group: dist.ProcessGroup) -> CopyEngineAllGather | None:
    """The all-gather for current CUDA devices that share a host and reach each other, else None. Collective."""
    if group.size() == 1:
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    places: list[tuple[str, str]] = [("", "")] * group.size()
    place = (socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid))
    dist.all_gather_object(places, place, group=group)
    reached: list[bool] = [False] * group.size()
    dist.all_gather_object(reached, _reaches(device, places), group=group)
    return CopyEngineAllGather(group, device) if all(reached) else None


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
