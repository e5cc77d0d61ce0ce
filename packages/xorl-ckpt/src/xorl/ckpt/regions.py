"""The part of a global tensor that this rank holds. Only this file queries DTensor for it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Region:
    """A box of a global tensor: its start and length in each dim. For a plain tensor it covers the whole tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def rows(self) -> tuple[int, int]:
        """The range along dim 0."""
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


class Piece:
    """Boxes of a global tensor, of which other ranks hold the rest. They decide what is saved and loaded.

    torch's distributed checkpoint calls the methods with underscores.

    Attributes:
        tensor: one that holds the boxes, and is a DTensor if its rows are sharded further.
        shape: of the global tensor.
        regions: the boxes whose values are the consecutive rows of the local tensor, in their order.
    """

    def __init__(
        self, tensor: torch.Tensor, shape: Sequence[int], boxes: Iterable[tuple[Sequence[int], Sequence[int]]]
    ) -> None:
        """`boxes`: the offsets and sizes of each."""
        self.tensor = tensor
        self.shape = torch.Size(shape)
        self.regions = tuple(Region(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes)
        self.dtype, self.device, self.ndim = tensor.dtype, tensor.device, tensor.ndim
        num_rows = sum(region.sizes[0] for region in self.regions)
        assert num_rows == local_tensor(tensor).shape[0], f"{self.regions} do not have the rows of the local tensor"

    def size(self) -> torch.Size:
        """The shape of the global tensor."""
        return self.shape

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        # DCP, which calls this, has imported them.
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties  # noqa: PLC0415
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType  # noqa: PLC0415

        properties = TensorProperties.create_from_tensor(local_tensor(self))
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: PLC0415

        boxes = [box for box, _ in local_boxes(self) if 0 not in box.sizes]
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]

    def at(self, offsets: Sequence[int]) -> torch.Tensor:
        """This rank's values of the box that begins there."""
        return next(part for box, part in local_boxes(self) if box.offsets == tuple(offsets))


Stored: TypeAlias = torch.Tensor | Piece


def local_tensor(tensor: Stored) -> torch.Tensor:
    """This rank's local storage of the tensor, which may be written in place."""
    tensor = tensor.tensor if isinstance(tensor, Piece) else tensor
    if is_dtensor(tensor):
        return tensor.to_local().detach()
    return tensor.detach()


def local_boxes(tensor: Stored) -> list[tuple[Region, torch.Tensor]]:
    """The regions that `local_tensor` covers, with the view of it that lies in each."""
    local = local_tensor(tensor)
    if not isinstance(tensor, Piece):
        return [(local_region(tensor), local)]
    return list(zip(tensor.regions, local.split([region.sizes[0] for region in tensor.regions]), strict=True))


def local_region(tensor: torch.Tensor) -> Region:
    """The region that `local_tensor` covers."""
    if not is_dtensor(tensor):
        return Region((0,) * tensor.ndim, tuple(tensor.shape))
    from xorl.ckpt.torch_private import local_shape_and_offset  # noqa: PLC0415 - imports DCP, which takes a second

    sizes, offsets = local_shape_and_offset(tensor)
    return Region(tuple(offsets), tuple(sizes))


def with_local(tensor: Stored, local: torch.Tensor) -> Stored:
    """A tensor that is placed like `tensor`, with `local` as this rank's part, which may be on another device."""
    if isinstance(tensor, Piece):
        boxes = [(region.offsets, region.sizes) for region in tensor.regions]
        return Piece(_like(tensor.tensor, local), tensor.shape, boxes)
    return _like(tensor, local)


def _like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if is_dtensor(tensor):
        from xorl.ckpt.torch_private import like  # noqa: PLC0415 - see local_region

        return like(tensor, local)
    return local


def gather_whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor on every rank of its mesh. Collective for a DTensor."""
    if is_dtensor(tensor):
        return tensor.full_tensor().detach()
    return tensor.detach()


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as torch spells it: `float32`."""
    return str(dtype).removeprefix("torch.")
