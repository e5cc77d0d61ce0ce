"""One gradient norm over every axis, and the one place where gradients are scaled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from xorl.core.optim.local import local
from xorl.kernels.optim import scale_


@torch.no_grad()
def scale_and_clip_(parameters: Sequence[Tensor], divisor: Tensor | float, max_norm: float | None) -> Tensor:
    """Divide the accumulated gradients by `divisor`, clip them to `max_norm` and return the norm before clipping.

    The norm is the 2-norm over all parameters and all their shards, accumulated in fp32: a scalar on the gradients'
    device, the same on every rank. Collective where gradients are sharded; no host synchronisation. `max_norm` None or
    0 leaves the gradients unclipped.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros((), device=parameters[0].device)
    norm = _total_norm(grads)
    if isinstance(divisor, Tensor):
        # Waits for the divisor only where gradients are in host memory, which the host has waited for anyway.
        divisor = divisor.to(norm.device)
    norm = norm / divisor
    scale = torch.ones_like(norm) / divisor
    if max_norm:
        scale = scale * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    _scale_([local(grad) for grad in grads], scale)
    return norm


def _scale_(grads: Sequence[Tensor], scale: Tensor) -> None:
    """Multiply in fp32 or more."""
    # torch would round the scale to a bf16 gradient's dtype first, and the whole step be off by that.
    half = [grad for grad in grads if grad.dtype == torch.bfloat16]
    for grad in half:
        if grad.is_contiguous():
            scale_(grad, scale)
        else:
            grad.copy_(grad.float() * scale)
    if len(half) < len(grads):
        torch._foreach_mul_([grad for grad in grads if grad.dtype != torch.bfloat16], scale)


def _total_norm(grads: Sequence[Tensor]) -> Tensor:
    by_axes: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for grad in grads:
        by_axes.setdefault(_sharding_groups(grad), []).append(local(grad))
    total = torch.zeros((), device=local(grads[0]).device)
    # Parameters are created in the same order on every rank, so the reductions below meet their peers.
    for groups, parts in by_axes.items():
        square = torch.stack(list(torch._foreach_norm(parts, 2, dtype=torch.float32))).square().sum()
        for group in groups:
            dist.all_reduce(square, group=group)
        total = total + square
    return total.sqrt()


def _sharding_groups(grad: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups over which this gradient's elements are spread: replicas do not count twice."""
    if not isinstance(grad, DTensor):
        return ()
    assert not any(isinstance(placement, Partial) for placement in grad.placements), "an unreduced gradient"
    mesh = grad.device_mesh
    return tuple(mesh.get_group(axis) for axis, where in enumerate(grad.placements) if isinstance(where, Shard))
