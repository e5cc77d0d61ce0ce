"""Replication by DistributedDataParallel, with gradients summed instead of averaged."""

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket

from xorl.core.mesh import Mesh
from xorl.core.torch_private import FixedBuckets, leave_out_of_replicas


class Replicated(FixedBuckets):
    """A replica. `on_last_bucket`, if set, is called in each backward pass once the last bucket is ready to reduce.

    summed: the trained parameters whose gradients the backward pass sums over the ranks.
    """

    on_last_bucket: Callable[[], None] | None = None
    summed: Sequence[nn.Parameter] = ()


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
    module.summed = trained_in_replicas(model, excluded)
    return module


def trained_in_replicas(model: nn.Module, excluded: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The trained parameters of `model` outside of the modules `excluded`."""
    own = {parameter for module in excluded for parameter in module.parameters()}
    return [parameter for parameter in model.parameters() if parameter.requires_grad and parameter not in own]


def _sum_gradients(owner: weakref.ref[Replicated], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that sums a bucket over the ranks in fp32, whatever its dtype."""
    replica = owner()
    assert replica is not None
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer.float(), group=replica.process_group, async_op=True)
    if bucket.is_last() and replica.on_last_bucket is not None:
        replica.on_last_bucket()
    assert work is not None
    # Sums of their own would stay in memory until the backward pass ends.
    return work.get_future().then(lambda future: buffer.copy_(future.value()[0]))
