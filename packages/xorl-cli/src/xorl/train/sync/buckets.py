"""Buckets: the weights that are sent together, and their layout in the send buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from xorl.ckpt.layout import TensorRecord
from xorl.ckpt.tensor_file import TensorGroup


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent as one byte buffer, in the order of `records` and without padding."""

    groups: tuple[TensorGroup, ...]

    @cached_property
    def records(self) -> Mapping[str, TensorRecord]:
        """Name -> record, widest dtypes first, so that every tensor is aligned: receivers view the bytes in place."""
        records = [item for group in self.groups for item in group.records.items()]
        return dict(sorted(records, key=lambda item: -item[1].torch_dtype.itemsize))

    @property
    def num_bytes(self) -> int:
        return sum(record.num_bytes for record in self.records.values())

    def fill_(self, buffer: Tensor | None) -> None:
        """Gather the tensors into `buffer`, uint8 [num_bytes]; collective. Ranks that do not send pass None."""
        starts: dict[str, int] = {}
        stop = 0
        for name, record in self.records.items():
            starts[name] = stop
            stop += record.num_bytes
        for group in self.groups:
            tensors = group.make()
            if buffer is None:
                del tensors
                continue
            for name, record in group.records.items():
                tensor = tensors[name]
                assert (tensor.shape, tensor.dtype) == (record.shape, record.torch_dtype), (
                    f"{name} does not match {record}"
                )
                part = buffer[starts[name] : starts[name] + record.num_bytes]
                part.copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
                del tensor
            # Free them before the next group is gathered.
            del tensors


def plan_buckets(groups: Sequence[TensorGroup], limit_bytes: int) -> list[Bucket]:
    """Fill buckets with `groups` in order, up to `limit_bytes` each. A group above the limit gets its own bucket."""
    planned: list[list[TensorGroup]] = []
    size = 0
    for group in groups:
        if not planned or size + group.num_bytes > limit_bytes:
            planned.append([])
            size = 0
        planned[-1].append(group)
        size += group.num_bytes
    return [Bucket(tuple(members)) for members in planned]
