"""Which weights travel together, and how they lie in the one buffer that carries them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from xorl.ckpt import TensorGroup, TensorRecord


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent as one buffer of bytes: their values in the order of `records`, with nothing between."""

    groups: tuple[TensorGroup, ...]

    @cached_property
    def records(self) -> Mapping[str, TensorRecord]:
        """By name, those of wide elements first: a receiver views the bytes in place, which needs them aligned."""
        records = [item for group in self.groups for item in group.records.items()]
        return dict(sorted(records, key=lambda item: -item[1].torch_dtype.itemsize))

    @property
    def num_bytes(self) -> int:
        return sum(record.num_bytes for record in self.records.values())

    def fill_(self, buffer: Tensor | None) -> None:
        """Make the tensors and copy them into `buffer`, uint8 [num_bytes], None where they go nowhere; collective."""
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
                assert (tensor.shape, tensor.dtype) == (record.shape, record.torch_dtype), f"{name} is no {record}"
                part = buffer[starts[name] : starts[name] + record.num_bytes]
                part.copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
                del tensor
            # Not held while the next ones are gathered.
            del tensors


def plan_buckets(groups: Sequence[TensorGroup], limit_bytes: int) -> list[Bucket]:
    """`groups` in their order, as many in a bucket as fit; one that is larger than the limit is alone in its own."""
    held: list[list[TensorGroup]] = []
    size = 0
    for group in groups:
        if not held or size + group.num_bytes > limit_bytes:
            held.append([])
            size = 0
        held[-1].append(group)
        size += group.num_bytes
    return [Bucket(tuple(together)) for together in held]
