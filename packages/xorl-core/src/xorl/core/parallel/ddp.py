"""Replication by DistributedDataParallel, with gradients summed instead of averaged."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from xorl.core.mesh import Mesh


def replicate(model: nn.Module, mesh: Mesh) -> DistributedDataParallel:
    """`model` on every data-parallel rank, its gradients the sum over ranks after the backward pass."""
    on_gpu = mesh.device_type == "cuda"
    module = DistributedDataParallel(
        model,
        device_ids=[torch.cuda.current_device()] if on_gpu else None,
        process_group=mesh.dp_group,
        gradient_as_bucket_view=True,
    )
    module.register_comm_hook(mesh.dp_group, _sum_gradients)
    return module


def _sum_gradients(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])
