"""`Parts`: parameters of which the ranks along an axis of the mesh hold different rows, and how to join these."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from xorl.core.mesh import Mesh
from xorl.core.nn.parts import Part, parameter_parts


class Parts(Mapping[str, Part]):
    """The parts of the parameters of `model` that this rank does not hold as a whole, by name.

    FSDP2 shards the rows of a part further; what it calls the whole tensor is the part.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._parts = parameter_parts(model)
        self._mesh = mesh

    def __getitem__(self, name: str) -> Part:
        return self._parts[name]

    def __iter__(self):  # noqa: ANN204
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def first_rows(self) -> dict[str, int]:
        """The index in the whole parameter of the first row of each part."""
        return {name: part.rows[0][0] for name, part in self.items()}

    def divided(self, model: nn.Module) -> dict[Tensor, tuple[dist.ProcessGroup, ...]]:
        """For each parameter of `model` that is divided, the process groups whose ranks hold its other rows."""
        return {
            parameter: tuple(self._mesh.axis(axis).group for axis in self[name].sharded_over)
            for name, parameter in model.named_parameters()
            if name in self
        }

    @torch.no_grad()
    def gather(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of `tensor`, which is held like the parameter `name`, on every rank. Collective if it is divided.

        `tensor` may be sharded by FSDP2. The result shares memory with a tensor that is whole.
        """
        tensor = cast(DTensor, tensor).full_tensor() if isinstance(tensor, DTensor) else tensor
        tensor = tensor.detach()
        if name not in self:
            return tensor
        [axis] = self[name].sharded_over
        group = self._mesh.axis(axis).group
        gathered = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(gathered, tensor.contiguous(), group=group)
        whole = tensor.new_empty(self[name].num_rows, *tensor.shape[1:])
        for held, values in zip(self._held[axis], gathered, strict=True):
            taken = 0
            for start, stop in held[name].rows:
                whole[start:stop] = values[taken : taken + stop - start]
                taken += stop - start
        return whole

    @cached_property
    def _held(self) -> dict[str, list[dict[str, Part]]]:
        """For each axis, the parts that its ranks hold, by rank. Collective."""
        found: dict[str, list[dict[str, Part]]] = {}
        for axis in sorted({axis for part in self.values() for axis in part.sharded_over}):
            group = self._mesh.axis(axis).group
            found[axis] = [{} for _ in range(group.size())]
            dist.all_gather_object(found[axis], self._parts, group=group)
        return found
