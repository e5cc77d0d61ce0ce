"""The global gradient norm, and the number to divide gradients by for averaging and clipping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from xorl.core.shards import is_dtensor, local, sharded_axes
from xorl.kernels.arguments import check_number, is_readable
from xorl.kernels.optim import scale_, square_sum
from xorl.kernels.torch_private import foreach_mul_

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


class Rest(NamedTuple):
    """The holders of the rest of a parameter, besides the ranks over which it is sharded.

    groups: the process groups whose ranks hold other rows. counted: the rows of this rank that count here, since other
    ranks hold the others, too; None: all.
    """

    groups: tuple[dist.ProcessGroup, ...] = ()
    counted: tuple[range, ...] | None = None


ALL = Rest()
Divided = Mapping[Tensor, Rest]
UNDIVIDED: Divided = MappingProxyType({})


@torch.no_grad()
def gradient_scale(
    parameters: Sequence[Tensor],
    divisor: Tensor | float,
    max_norm: float | None,
    norm: Tensor | None = None,
    *,
    divided: Divided = UNDIVIDED,
    stages: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (norm, scale): the norm of the gradients divided by `divisor`, and the number to divide gradients by.

    The norm is the 2-norm over all parameters and all their shards, accumulated in fp32, before clipping. Dividing by
    the scale also clips to `max_norm`; None or 0 disables clipping. If the norm of the undivided gradients is already
    known, pass it as `norm`. Both results are fp32 scalars on the gradients' device, the same on every rank. The
    gradients are not changed. Collective if parameters are sharded, also on a rank where none has a gradient; does not
    synchronise with the host. For `divided`, `stages` and `device` see `gradient_norms`.

    Raises ValueError unless `parameters` is a list or tuple of tensors, for a number as divisor that is not above 0,
    and for a negative `max_norm`. With a tensor of 0, as in a step without trained tokens, the norm is not finite.
    """
    _check_scale(parameters, divisor, max_norm, may_be_empty=device is not None)
    [norm] = gradient_norms([parameters], divided, stages, device) if norm is None else [norm]
    # This synchronises only if gradients are in host memory, where the host has already waited for them.
    scale = divisor.to(norm) if isinstance(divisor, Tensor) else torch.full_like(norm, divisor)
    norm = norm / scale
    if max_norm:
        scale = scale * torch.clamp((norm + 1e-6) / max_norm, min=1.0)
    return norm, scale


@torch.no_grad()
def gradient_norms(
    sets: Sequence[Sequence[Tensor]],
    divided: Divided = UNDIVIDED,
    stages: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """The 2-norms of the gradients of several sets of parameters, in fp32: [number of sets].

    Every element counts once, wherever it is held; a parameter without a gradient counts 0. Collective if any parameter
    is sharded: one reduction for each way of sharding, on every rank in the same order, whatever has gradients.

    divided: for each parameter of which the ranks of further process groups hold some, who they are.
    stages: the ranks that hold other parameters of the same sets; some of them may hold none.
    device: where gradients are on all these ranks; None: where the first parameter is, which each rank then must have.

    Raises ValueError if a set is no list or tuple, or if no set has a parameter, unless `device` is given.
    """
    if not isinstance(sets, list | tuple) or not all(isinstance(one, list | tuple) for one in sets):
        raise ValueError("sets: must be a list of lists of tensors; pass [list(parameters)] for one set")
    if not any(sets) and device is None:
        raise ValueError("sets: there are no parameters in any set")
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[list[Tensor]]] = {}
    # Query the mesh once per placement, not per parameter: there are few placements and many parameters.
    of_placement: dict[tuple[DeviceMesh, tuple[Placement, ...]], tuple[dist.ProcessGroup, ...]] = {}
    for index, parameters in enumerate(sets):
        for parameter in parameters:
            groups: tuple[dist.ProcessGroup, ...] = ()
            if is_dtensor(parameter):
                placement = (parameter.device_mesh, parameter.placements)
                if placement not in of_placement:
                    of_placement[placement] = _sharding_groups(*placement)
                groups = of_placement[placement]
            rest = divided.get(parameter, ALL)
            by_set = by_groups.setdefault((*groups, *rest.groups), [[] for _ in sets])
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                by_set[index] += (
                    [gradient] if rest.counted is None else [gradient[rows.start : rows.stop] for rows in rest.counted]
                )
    if device is None:
        device = next(local(parameter).device for parameters in sets for parameter in parameters)
    total = torch.zeros(len(sets), device=device)
    # Parameters are in the same order on every rank, so all ranks issue these reductions in the same order.
    for groups, by_set in by_groups.items():
        squares = torch.stack([square_sum(grads) if grads else total.new_zeros(()) for grads in by_set])
        for group in groups:
            dist.all_reduce(squares, group=group)
        total = total + squares
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


@torch.no_grad()
def scale_and_clip_(parameters: Iterable[Tensor], divisor: Tensor | float, max_norm: float | None) -> Tensor:
    """Divide the gradients by the scale of `gradient_scale`, for optimizers without `grad_scale`; return the norm.

    Raises ValueError without parameters, and for a divisor or a norm that is no number above 0 (None: no clipping).
    """
    if isinstance(parameters, Tensor):
        raise ValueError("parameters: must be a list of tensors, got a single tensor; pass [tensor]")
    parameters = list(parameters)
    norm, scale = gradient_scale(parameters, divisor, max_norm)
    _scale_([local(p.grad) for p in parameters if p.grad is not None], 1 / scale)
    return norm


def _check_scale(parameters: object, divisor: Tensor | float, max_norm: float | None, *, may_be_empty: bool) -> None:
    """Raise ValueError for arguments that `gradient_scale` cannot use. Looks at one parameter: there may be many."""
    if not isinstance(parameters, list | tuple):
        raise ValueError(f"parameters: must be a list of tensors, got {type(parameters).__name__}; pass a list")
    if not parameters and not may_be_empty:
        raise ValueError("parameters: there are none; an iterator, such as parameters(), can be used only once")
    if parameters and not isinstance(parameters[0], Tensor):
        raise ValueError(f"parameters: must be a list of tensors, got one of {type(parameters[0]).__name__}")
    if not isinstance(divisor, Tensor):
        check_number("divisor", divisor)
        if not divisor:
            raise ValueError("divisor: is 0; pass the number of trained tokens over all ranks")
    elif divisor.dim() or (is_readable(divisor) and divisor.isinf()):
        raise ValueError(f"divisor: must be one finite number above 0, got {divisor}")
    if max_norm is not None:
        check_number("max_norm", max_norm)


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
        foreach_mul_([grad for grad in grads if grad.dtype != torch.bfloat16], scale)


def _sharding_groups(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[dist.ProcessGroup, ...]:
    """The groups that a gradient is sharded over. Replicas are left out, so that no element counts twice."""
    return tuple(mesh.get_group(axis) for axis in sharded_axes(placements))
