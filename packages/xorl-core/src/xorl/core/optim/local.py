"""What of a tensor is on this rank."""

import math
from typing import cast

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this rank holds, sharing its memory; a plain tensor itself."""
    return cast(DTensor, tensor).to_local() if isinstance(tensor, DTensor) else tensor


def first_element(tensor: Tensor) -> int:
    """Where in the whole tensor, in row-major order, this rank's part begins; the part is whole rows."""
    if not isinstance(tensor, DTensor):
        return 0
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(shape[1:]) == tuple(tensor.shape[1:]), f"sharded beyond its rows: {tensor.placements}"
    return offset[0] * math.prod(tensor.shape[1:]) if offset else 0
