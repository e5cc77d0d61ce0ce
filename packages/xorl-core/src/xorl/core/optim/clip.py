"""The global gradient norm, and the number to divide gradients by for averaging and clipping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from xorl.core.shards import is_dtensor, local
from xorl.kernels.optim import scale_, square_sum

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


@torch.no_grad()
def gradient_scale(
    parameters: Sequence[Tensor], divisor: Tensor | float, max_norm: float | None, norm: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (norm, scale): the norm of the gradients divided by `divisor`, and the number to divide gradients by.

    The norm is the 2-norm over all parameters and all their shards, accumulated in fp32, before clipping. Dividing by
    the scale also clips to `max_norm`; None or 0 disables clipping. If the norm of the undivided gradients is already
    known, pass it as `norm`. Both results are fp32 scalars on the gradients' device, the same on every rank. The
    gradients are not changed. Collective if gradients are sharded; does not synchronise with the host.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        zero = torch.zeros((), device=parameters[0].device)
        return zero, zero + 1
    norm = _total_norm(grads) if norm is None else norm
    # This synchronises only if gradients are in host memory, where the host has already waited for them.
    scale = divisor.to(norm) if isinstance(divisor, Tensor) else torch.full_like(norm, divisor)
    norm = norm / scale
    if max_norm:
        scale = scale * torch.clamp((norm + 1e-6) / max_norm, min=1.0)
    return norm, scale


@torch.no_grad()
def scale_and_clip_(parameters: Sequence[Tensor], divisor: Tensor | float, max_norm: float | None) -> Tensor:
    """Divide the gradients by the scale of `gradient_scale`, for optimizers without `grad_scale`; return the norm."""
    norm, scale = gradient_scale(parameters, divisor, max_norm)
    _scale_([local(p.grad) for p in parameters if p.grad is not None], 1 / scale)
    return norm


def _scale_(grads: Sequence[Tensor], scale: Tensor) -> None:
    """Multiply in fp32 or fp64."""
    # torch would first round the scale to the dtype of a bf16 gradient, which biases the whole step.
    bf16_grads = [grad for grad in grads if grad.dtype == torch.bfloat16]
    for grad in bf16_grads:
        if grad.is_contiguous():
            scale_(grad, scale)
        else:
            grad.copy_(grad.float() * scale)
    if len(bf16_grads) < len(grads):
        torch._foreach_mul_([grad for grad in grads if grad.dtype != torch.bfloat16], scale)


def _total_norm(grads: Sequence[Tensor]) -> Tensor:
    # Query the mesh once per placement, not per gradient: there are few placements and many gradients.
    by_placement: dict[tuple[DeviceMesh, tuple[Placement, ...]] | None, list[Tensor]] = {}
    for grad in grads:
        placement = (grad.device_mesh, grad.placements) if is_dtensor(grad) else None
        by_placement.setdefault(placement, []).append(local(grad))
    by_axes: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for placement, parts in by_placement.items():
        by_axes.setdefault(() if placement is None else _sharding_groups(*placement), []).extend(parts)
    total = torch.zeros((), device=local(grads[0]).device)
    # Parameters are in the same order on every rank, so all ranks issue these reductions in the same order.
    for groups, parts in by_axes.items():
        square = square_sum(parts)
        for group in groups:
            dist.all_reduce(square, group=group)
        total = total + square
    return total.sqrt()


def _sharding_groups(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[dist.ProcessGroup, ...]:
    """The groups that a gradient is sharded over. Replicas are left out, so that no element counts twice."""
    assert not any(placement.is_partial() for placement in placements), "gradients must be reduced first"
    return tuple(mesh.get_group(axis) for axis, placement in enumerate(placements) if placement.is_shard())
