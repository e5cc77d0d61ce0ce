"""Which part of a global tensor this rank holds. Only this file queries DTensor for it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Region:
    """A box of a global tensor: its start and length in each dim. For a plain tensor it covers the whole tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def rows(self) -> tuple[int, int]:
        """The range along dim 0; (0, 0) if the box is empty."""
        if 0 in self.sizes:
            return 0, 0
        return self.offsets[0], self.offsets[0] + self.sizes[0]

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """The view of this box in the global tensor."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(dim, offset, size)
        return whole

    def cut_other_dims(self, rows: torch.Tensor) -> torch.Tensor:
        """The view of this box in `rows`, which are already cut along dim 0."""
        for dim in range(1, len(self.sizes)):
            rows = rows.narrow(dim, self.offsets[dim], self.sizes[dim])
        return rows


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether `tensor` is a DTensor. There is none before torch's module of them is imported, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's local storage of the tensor, which may be written in place."""
    if is_dtensor(tensor):
        return tensor.to_local().detach()
    return tensor.detach()


def local_region(tensor: torch.Tensor) -> Region:
    """The region that `local_tensor` covers."""
    if not is_dtensor(tensor):
        return Region((0,) * tensor.ndim, tuple(tensor.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415 - see is_dtensor

    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Region(tuple(offsets), tuple(sizes))


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor that is placed like `tensor`, with `local` as this rank's part, which may be on another device."""
    if is_dtensor(tensor):
        # `DTensor.from_local` would move the part to the device of the mesh.
        return type(tensor)(local, tensor._spec, requires_grad=False)
    return local


def gather_whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor on every rank of its mesh. Collective for a DTensor."""
    if is_dtensor(tensor):
        return tensor.full_tensor().detach()
    return tensor.detach()


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as torch spells it: `float32`."""
    return str(dtype).removeprefix("torch.")
