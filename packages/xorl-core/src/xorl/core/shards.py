"""This rank's part of a tensor that may be sharded."""

import math
from collections.abc import Sequence
from typing import cast

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, sharing its memory; a plain tensor is returned as it is."""
    return cast(DTensor, tensor).to_local() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> tuple[Tensor, Sequence[int]]:
    """This rank's part of `tensor`, sharing its memory, and the index of its first element in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.dim()
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), offset


def flat_offset(tensor: Tensor) -> int:
    """The row-major index in the whole tensor of this rank's first element. Only rows may be sharded."""
    if not isinstance(tensor, DTensor):
        return 0
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(shape[1:]) == tuple(tensor.shape[1:]), f"only rows may be sharded, not {tensor.placements}"
    return offset[0] * math.prod(tensor.shape[1:]) if offset else 0
