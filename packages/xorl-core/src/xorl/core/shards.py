"""This rank's part of a tensor that may be sharded, and blocks of tensors."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Box:
    """A block of a tensor: the index of its first element, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def cut(self, whole: Tensor) -> Tensor:
        """The view of this block in the tensor."""
        return whole[tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))]

    def first_of(self, whole: Sequence[int]) -> int:
        """The row-major index of its first element in a tensor of the shape `whole`."""
        return sum(start * math.prod(whole[dim + 1 :]) for dim, start in enumerate(self.offset))


def local_box(tensor: Tensor) -> Box:
    """Where `local(tensor)` lies in the tensor."""
    if not is_dtensor(tensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    from xorl.core.torch_private import local_shape_and_offset  # noqa: PLC0415 - see is_dtensor

    shape, offset = local_shape_and_offset(tensor)
    return Box(tuple(offset), tuple(shape))


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
    local(parameter).copy_(local_box(parameter).cut(full))
