"""Replication by DistributedDataParallel, with gradients summed instead of averaged."""

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.nn import functional as F

from xorl.core.mesh import Mesh
from xorl.core.torch_private import FixedBuckets, leave_out_of_replicas


class Replicated(FixedBuckets):
    """A replica. `on_last_bucket`, if set, is called in each backward pass once the last bucket is ready to reduce.

    summed: the trained parameters whose gradients the backward pass sums over the ranks.
    stream: the CUDA stream on which gradients are summed; None on a CPU.
    """

    on_last_bucket: Callable[[], None] | None = None
    summed: Sequence[nn.Parameter] = ()
    stream: torch.cuda.Stream | None = None


def replicate(model: nn.Module, mesh: Mesh, excluded: Sequence[nn.Module] = ()) -> Replicated:
    """Replicate `model` on every data-parallel rank; the backward pass sums gradients over ranks.

    `excluded` are modules of which each rank holds a different one, such as its experts. Their gradients are not
    summed.
    """
    leave_out_of_replicas(model, {parameter for module in excluded for parameter in module.parameters()})
    on_gpu = mesh.device_type == "cuda"
    module = Replicated(
        model,
        device_ids=[torch.cuda.current_device()] if on_gpu else None,
        process_group=mesh.loss.group,
        gradient_as_bucket_view=True,
    )
    # The replica holds the reducer, which holds its hook's argument: with a strong one, neither would be freed.
    module.register_comm_hook(weakref.ref(module), _sum_gradients)
    module.stream = torch.cuda.Stream() if on_gpu else None
    module.summed = trained_in_replicas(model, excluded)
    return module


def trained_in_replicas(model: nn.Module, excluded: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The trained parameters of `model` outside of the modules `excluded`."""
    own = {parameter for module in excluded for parameter in module.parameters()}
    return [parameter for parameter in model.parameters() if parameter.requires_grad and parameter not in own]


def _sum_gradients(owner: weakref.ref[Replicated], bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook that sums a bucket over the ranks, in fp32 or its own dtype if that is wider."""
    replica = owner()
    assert replica is not None
    assert replica.process_group is not None
    buffer, stream = bucket.buffer(), replica.stream
    if bucket.is_last() and replica.on_last_bucket is not None:
        replica.on_last_bucket()
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    # All sums run on one stream and reuse its memory, so they do not pile up when the host runs ahead of the device.
    with torch.cuda.stream(stream):
        if buffer.dtype in (torch.float32, torch.float64):
            dist.all_reduce(buffer, group=replica.process_group)
        else:
            _sum_in_fp32(buffer, replica.process_group)
        summed = torch.futures.Future[Tensor](devices=None if stream is None else [buffer.device])
        # A sum in other memory would stay there until the backward pass ends.
        summed.set_result(buffer)
    return summed


def _sum_in_fp32(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """Sum a bucket over the ranks in fp32, in place. Each rank adds up one part of it and rounds the sums once.

    Values travel in their own dtype: in half precision, that is half the traffic of an all-reduce in fp32.

    Args:
        buffer: [N].
    """
    num_ranks = group.size()
    num_padding = -len(buffer) % num_ranks
    values = F.pad(buffer, (0, num_padding)) if num_padding else buffer
    received = torch.empty_like(values)
    dist.all_to_all_single(received, values, group=group)
    own = received.view(num_ranks, -1).sum(0, dtype=torch.float32).to(buffer.dtype)
    dist.all_gather_into_tensor(values, own, group=group)
    if num_padding:
        buffer.copy_(values[:-num_padding])
