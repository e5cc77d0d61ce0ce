"""Which part of a global tensor this rank holds. Only this file queries DTensor for it."""

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


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


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's local storage of the tensor, which may be written in place."""
    if isinstance(tensor, DTensor):
        return tensor.to_local().detach()
    return tensor.detach()


def local_region(tensor: torch.Tensor) -> Region:
    """The region that `local_tensor` covers."""
    if not isinstance(tensor, DTensor):
        return Region((0,) * tensor.ndim, tuple(tensor.shape))
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Region(tuple(offsets), tuple(sizes))


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor that is placed like `tensor`, with `local` as this rank's part, which may be on another device."""
    if isinstance(tensor, DTensor):
        # `DTensor.from_local` would move the part to the device of the mesh.
        return DTensor(local, tensor._spec, requires_grad=False)
    return local


def gather_whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor on every rank of its mesh. Collective for a DTensor."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach()
    return tensor.detach()


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as torch spells it: `float32`."""
    return str(dtype).removeprefix("torch.")
