"""This rank's part of a tensor that may be sharded."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether `tensor` is a DTensor. There is none before torch's module of them is imported, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, sharing its memory; a plain tensor is returned as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_part(tensor: Tensor) -> tuple[Tensor, Sequence[int]]:
    """This rank's part of `tensor`, sharing its memory, and the index of its first element in the whole."""
    if not is_dtensor(tensor):
        return tensor, (0,) * tensor.dim()
    _, offset = _shape_and_offset(tensor)
    return tensor.to_local(), offset


def flat_offset(tensor: Tensor) -> int:
    """The row-major index in the whole tensor of this rank's first element. Only rows may be sharded."""
    if not is_dtensor(tensor):
        return 0
    shape, offset = _shape_and_offset(tensor)
    assert tuple(shape[1:]) == tuple(tensor.shape[1:]), f"only rows may be sharded, not {tensor.placements}"
    return offset[0] * math.prod(tensor.shape[1:]) if offset else 0


def shard_groups(weight: Tensor) -> list[dist.ProcessGroup]:
    """The process groups over which the rows of `weight` are sharded; empty if it is not sharded."""
    if not is_dtensor(weight):
        return []
    return [weight.device_mesh.get_group(axis) for axis in sharded_axes(weight.placements)]


def sharded_axes(placements: Sequence[Placement]) -> list[int]:
    """The axes of a mesh over which a tensor is sharded; over the others, it must be replicated."""
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 - see is_dtensor

    # torch has placements that neither are a Shard nor copies, and partial sums must be reduced first.
    assert all(type(placement) in (Shard, Replicate) for placement in placements), f"{placements} cannot be summed"
    return [axis for axis, placement in enumerate(placements) if isinstance(placement, Shard)]


@torch.no_grad()
def copy_shard_(parameter: Tensor, full: Tensor) -> None:
    """Copy this rank's part of `full`, the whole tensor, into `parameter`, sharded or not. Not collective.

    Raises ValueError if their shapes differ.
    """
    if full.shape != parameter.shape:
        raise ValueError(f"full: must have the parameter's shape {list(parameter.shape)}, got {list(full.shape)}")
    part, offset = local_part(parameter)
    part.copy_(full[tuple(slice(start, start + size) for start, size in zip(offset, part.shape, strict=True))])


def _shape_and_offset(tensor: DTensor) -> tuple[Sequence[int], Sequence[int]]:
    from xorl.core.torch_private import local_shape_and_offset  # noqa: PLC0415 - see is_dtensor

    return local_shape_and_offset(tensor)
