"""Which part of a global tensor this rank holds. Only this file queries DTensor for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
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


class Piece:
    """Some rows of a global tensor, of which other ranks hold the rest. Their boxes decide what is saved and loaded.

    torch's distributed checkpoint calls the methods with underscores.

    Attributes:
        tensor: the rows, which may be sharded further: a DTensor then, whose whole is these rows.
        rows: ranges [start, stop) of the rows of the global tensor, in the order in which `tensor` holds them.
        shape: of the global tensor.
    """

    def __init__(self, tensor: torch.Tensor, rows: Sequence[tuple[int, int]], num_rows: int) -> None:
        assert sum(stop - start for start, stop in rows) == tensor.shape[0], f"{rows} are not {tensor.shape[0]} rows"
        self.tensor = tensor
        self.rows = tuple(rows)
        self.shape = torch.Size((num_rows, *tensor.shape[1:]))
        self.dtype, self.device, self.ndim = tensor.dtype, tensor.device, tensor.ndim

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
    inner = local_region(tensor.tensor)
    first, last = inner.rows
    found: list[tuple[Region, torch.Tensor]] = []
    held = 0  # the rows of the ranges so far
    for start, stop in tensor.rows:
        begin, end = max(first, held), min(last, held + stop - start)
        if begin < end:
            box = Region((start + begin - held, *inner.offsets[1:]), (end - begin, *inner.sizes[1:]))
            found.append((box, local[begin - first : end - first]))
        held += stop - start
    return found or [(Region((0,) * len(inner.sizes), (0, *inner.sizes[1:])), local)]


def local_region(tensor: Stored) -> Region:
    """The region that `local_tensor` covers, which must be a single one."""
    if isinstance(tensor, Piece):
        [(region, _)] = local_boxes(tensor)
        return region
    if not is_dtensor(tensor):
        return Region((0,) * tensor.ndim, tuple(tensor.shape))
    from xorl.ckpt.torch_private import local_shape_and_offset  # noqa: PLC0415 - imports DCP, which takes a second

    sizes, offsets = local_shape_and_offset(tensor)
    return Region(tuple(offsets), tuple(sizes))


def with_local(tensor: Stored, local: torch.Tensor) -> Stored:
    """A tensor that is placed like `tensor`, with `local` as this rank's part, which may be on another device."""
    if isinstance(tensor, Piece):
        return Piece(_like(tensor.tensor, local), tensor.rows, tensor.shape[0])
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
