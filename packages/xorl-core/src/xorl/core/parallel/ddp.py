"""Replication by DistributedDataParallel, with gradients summed instead of averaged."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket

from xorl.core.mesh import Mesh
from xorl.core.torch_private import FixedBuckets


class Replicated(FixedBuckets):
    """A replica. `on_last_bucket`, if set, is called in each backward pass once the last bucket is ready to reduce."""

    on_last_bucket: Callable[[], None] | None = None


def replicate(model: nn.Module, mesh: Mesh) -> Replicated:
    """Replicate `model` on every data-parallel rank; the backward pass sums gradients over ranks."""
    on_gpu = mesh.device_type == "cuda"
    module = Replicated(
        model,
        device_ids=[torch.cuda.current_device()] if on_gpu else None,
        process_group=mesh.loss.group,
        gradient_as_bucket_view=True,
    )
    module.register_comm_hook(module, _sum_gradients)
    return module


def _sum_gradients(replica: Replicated, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that sums a bucket over the ranks in fp32, whatever its dtype."""
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer.float(), group=replica.process_group, async_op=True)
    if bucket.is_last() and replica.on_last_bucket is not None:
        replica.on_last_bucket()
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0].to(buffer.dtype))
