"""The private parts of torch that xorl-ckpt uses; any release of torch may change them.

A test ensures that no other file of this package names a private part of torch. Holds for torch 2.10 to 2.15:
`tools/check_torch.py` runs the tests on the oldest and the newest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["MEMORY_FORMAT", "StorageInfo", "like", "local_shape_and_offset", "pin_memory", "unpin_memory"]

MEMORY_FORMAT = dcp._MEM_FORMAT_ENCODING
"""How the metadata of a checkpoint encodes a tensor's memory format."""


def local_shape_and_offset(tensor: DTensor) -> tuple[Sequence[int], Sequence[int]]:
    """The shape of this rank's shard, and the index of its first element in the whole."""
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor that is placed like `tensor`, with `local` as this rank's shard, on whatever device it is.

    `DTensor.from_local` would move the shard to the device of the mesh.
    """
    return type(tensor)(local, tensor._spec, requires_grad=False)
