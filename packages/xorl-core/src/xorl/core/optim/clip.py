"""One gradient norm over every axis, and the one number that gradients are divided by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from xorl.core.optim.local import local
from xorl.kernels.optim import scale_, square_sum


@torch.no_grad()
def gradient_scale(
    parameters: Sequence[Tensor], divisor: Tensor | float, max_norm: float | None, norm: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(norm, scale): the norm of the gradients divided by `divisor`, and what to divide them by to clip them too.

    The norm is the 2-norm over all parameters and all their shards, accumulated in fp32, before clipping to `max_norm`,
    which None or 0 leaves out; `norm` is that of the undivided gradients where it is known. Both are fp32 scalars on
    the gradients' device, the same on every rank; no gradient is changed. Collective where gradients are sharded; no
    host synchronisation.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        zero = torch.zeros((), device=parameters[0].device)
        return zero, zero + 1
    norm = _total_norm(grads) if norm is None else norm
    # Waits for the divisor only where gradients are in host memory, which the host has waited for anyway.
    scale = divisor.to(norm) if isinstance(divisor, Tensor) else torch.full_like(norm, divisor)
    norm = norm / scale
    if max_norm:
        scale = scale * torch.clamp((norm + 1e-6) / max_norm, min=1.0)
    return norm, scale


@torch.no_grad()
def scale_and_clip_(parameters: Sequence[Tensor], divisor: Tensor | float, max_norm: float | None) -> Tensor:
    """Divide the gradients as `gradient_scale` says, for an optimizer that cannot, and return the norm it returns."""
    norm, scale = gradient_scale(parameters, divisor, max_norm)
    _scale_([local(p.grad) for p in parameters if p.grad is not None], 1 / scale)
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
    # Placements are few and gradients many: what is asked of the mesh is asked once a placement.
    by_placement: dict[tuple[DeviceMesh, tuple[Placement, ...]] | None, list[Tensor]] = {}
    for grad in grads:
        where = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        by_placement.setdefault(where, []).append(local(grad))
    by_axes: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for where, parts in by_placement.items():
        by_axes.setdefault(() if where is None else _sharding_groups(*where), []).extend(parts)
    total = torch.zeros((), device=local(grads[0]).device)
    # Parameters are created in the same order on every rank, so the reductions below meet their peers.
    for groups, parts in by_axes.items():
        square = square_sum(parts)
        for group in groups:
            dist.all_reduce(square, group=group)
        total = total + square
    return total.sqrt()


def _sharding_groups(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[dist.ProcessGroup, ...]:
    """The groups over which a gradient's elements are spread: replicas do not count twice."""
    assert not any(isinstance(placement, Partial) for placement in placements), "an unreduced gradient"
    return tuple(mesh.get_group(axis) for axis, where in enumerate(placements) if isinstance(where, Shard))
