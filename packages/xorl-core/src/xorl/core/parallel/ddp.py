"""Replication by DistributedDataParallel, with gradients summed instead of averaged."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from xorl.core.mesh import Mesh


class Replicated(DistributedDataParallel):
    """A replica. `on_last_bucket`, if set, is called in each backward pass once the last bucket is ready to reduce.

    Buckets are built once, in the reverse order of the parameters, whereas torch would rebuild them after the first
    backward pass. The layout determines the order in which gradients are summed over ranks, so after a rebuild, a
    resumed run would round differently.
    """

    on_last_bucket: Callable[[], None] | None = None

    def __init__(self, module: nn.Module, **options: object) -> None:
        super().__init__(module, **options)  # pyright: ignore[reportArgumentType]
        self.reducer._push_all_rebuilt_params()
        self._has_rebuilt_buckets = self.reducer._rebuild_buckets()
        assert self._has_rebuilt_buckets, "torch rebuilds buckets only once"

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, is_sparse = super()._build_params_for_reducer()
        return parameters[::-1], is_sparse[::-1]


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
