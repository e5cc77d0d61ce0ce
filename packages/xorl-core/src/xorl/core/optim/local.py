"""What of a tensor is on this rank."""

from typing import cast

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this rank holds, sharing its memory; a plain tensor itself."""
    return cast(DTensor, tensor).to_local() if isinstance(tensor, DTensor) else tensor
