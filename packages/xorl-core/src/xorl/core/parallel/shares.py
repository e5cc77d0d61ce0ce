"""`Shares`: the parameters of a model that a rank does not hold as a whole, and how the ranks join these."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from xorl.core.mesh import Mesh
from xorl.core.nn.moe import Experts
from xorl.core.nn.share import ENDS, Share, copied_rows, shares_of
from xorl.core.nn.tensor import AXIS
from xorl.core.optim.clip import ALL, Rest
from xorl.core.shards import Box, local


class Shares(Mapping[str, Share]):
    """The shares that this rank's modules hold of parameters of `model` that they do not hold as a whole, by name.

    FSDP2 shards the rows of a share further; what it calls the whole tensor is the share.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._shares = shares_of(model)
        self._mesh = mesh
        self._paths = [path for path, _ in model.named_modules()]
        if mesh.tp.size > 1:
            self._shares |= _summed_over_tp(model, self._shares)
        self._copied = sorted({number for share in self.values() for number, _ in share.copies if number > 1})
        for number in self._copied:
            mesh.neighbours(number)

    def __getitem__(self, name: str) -> Share:
        return self._shares[name]

    def __iter__(self):  # noqa: ANN204
        return iter(self._shares)

    def __len__(self) -> int:
        return len(self._shares)

    def of_ranks(self, name: str) -> list[Share]:
        """The shares of a divided parameter that the ranks of its axis hold, by rank. Collective when first called."""
        [axis] = self[name].divided_over
        return [shares[name] for shares in self._by_rank[axis]]

    def divided(self, model: nn.Module) -> dict[Tensor, Rest]:
        """For each parameter of `model` that is divided, the ranks that hold the rest of it."""
        found: dict[Tensor, Rest] = {}
        for name, parameter in model.named_parameters():
            share = self.get(name)
            if share is not None and share.divided_over:
                counted = tuple(rows for rows, _, index in copied_rows(parameter, share) if not index)
                groups = tuple(self._mesh.axis(axis).group for axis in share.divided_over)
                found[parameter] = Rest(groups, counted if share.copies else None)
            if share is not None and ENDS in share.summed_over and self._mesh.axis(ENDS).rank:
                found[parameter] = found.get(parameter, ALL)._replace(counted=())  # the other end counts it
        return found

    @torch.no_grad()
    def sum_gradients(self, model: nn.Module) -> None:
        """Sum the gradients of which each rank has some of the terms. Collective: call it once, before a step."""
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        gradients: dict[str, Tensor] = {}
        for name, share in self.items():
            if name in trained and (share.summed_over or share.copies):
                if trained[name].grad is None:  # of a rank without tokens
                    trained[name].grad = torch.zeros_like(trained[name])
                gradients[name] = cast(Tensor, trained[name].grad)
        for axis in sorted({axis for share in self.values() for axis in share.summed_over}):
            summed = [local(gradient) for name, gradient in gradients.items() if axis in self[name].summed_over]
            self._sum_(summed, self._mesh.axis(axis).group)
        self._sum_copies_(gradients)

    def gather_gradient(self, name: str, parameter: Tensor) -> Tensor:
        """The whole gradient of a parameter before `sum_gradients`, on every rank; as `gather`. 0 if it has none."""
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if name in self:
            self._sum_copies_({name: gradient})
        whole = self.gather(name, gradient)
        for axis in self[name].summed_over if name in self else ():
            dist.all_reduce(whole, group=self._mesh.axis(axis).group)
        return whole

    def _sum_copies_(self, gradients: Mapping[str, Tensor]) -> None:
        """Sum the rows of gradients that several ranks hold over these."""
        for number in self._copied:
            held = [
                local(gradient)[rows.start : rows.stop]
                for name, gradient in gradients.items()
                for rows, num_ranks, _ in copied_rows(gradient, self[name])
                if num_ranks == number
            ]
            self._sum_(held, self._mesh.neighbours(number))

    def _sum_(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        """Sum tensors over the ranks of a group, in fp32, in one collective."""
        if not tensors:
            return
        # Those of parameters in host memory are there, too, where NCCL cannot sum them.
        summed = torch.cat([tensor.float().flatten() for tensor in tensors]).to(self._mesh.device_type)
        dist.all_reduce(summed, group=group)
        for tensor, values in zip(tensors, summed.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(values.view(tensor.shape))

    @torch.no_grad()
    def gather(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of `tensor`, which is held like the parameter `name`, on every rank. Collective if it is divided.

        `tensor` may be sharded by FSDP2. The result shares memory with a tensor that is whole.
        """
        tensor = cast(DTensor, tensor).full_tensor() if isinstance(tensor, DTensor) else tensor
        tensor = tensor.detach()
        if name not in self or not self[name].divided_over:
            return tensor
        [axis] = self[name].divided_over
        whole = tensor.new_empty(self[name].whole(tensor.shape))
        by_rank = self.of_ranks(name)
        shapes = [share.held(whole.shape) for share in by_rank]
        # The ranks may hold different numbers of rows.
        sent = tensor.new_empty(max(map(math.prod, shapes)))
        sent[: tensor.numel()] = tensor.flatten()
        gathered = [torch.empty_like(sent) for _ in by_rank]
        dist.all_gather(gathered, sent, group=self._mesh.axis(axis).group)
        for share, shape, values in zip(by_rank, shapes, gathered, strict=True):
            boxes = list(share.boxes(Box((0,) * len(shape), shape)))
            rows = values[: math.prod(shape)].view(shape).split([box.shape[0] for box in boxes])
            for box, part in zip(boxes, rows, strict=True):
                box.cut(whole).copy_(part)
        return whole

    @torch.no_grad()
    def from_stage(self, path: str, make: Callable[[], Tensor]) -> Tensor:
        """The result of `make()` on the stage of a pipeline that has the module `path`, on all stages. Collective."""
        pp = self._mesh.pp
        if pp.size == 1:
            return make()
        holder = self._holders[path]
        value = make() if pp.rank == holder else None
        described: list[tuple[torch.Size, torch.dtype] | None] = [None if value is None else (value.shape, value.dtype)]
        dist.broadcast_object_list(described, group=pp.group, group_src=holder)
        assert described[0] is not None, "the holder described it"
        shape, dtype = described[0]
        device = torch.device(self._mesh.device_type)
        sent = torch.empty(shape, dtype=dtype, device=device) if value is None else value.to(device).contiguous()
        dist.broadcast(sent, group=pp.group, group_src=holder)
        return sent if value is None else value

    @cached_property
    def _holders(self) -> dict[str, int]:
        """The index in the pipeline of the first rank that has each module, by its path. Collective."""
        by_stage: list[list[str]] = [self._paths] * self._mesh.pp.size
        dist.all_gather_object(by_stage, self._paths, group=self._mesh.pp.group)
        return {path: rank for rank, paths in reversed(list(enumerate(by_stage))) for path in paths}

    @cached_property
    def _by_rank(self) -> dict[str, list[dict[str, Share]]]:
        """For each axis, the shares of its ranks, by rank. Collective."""
        found: dict[str, list[dict[str, Share]]] = {}
        for axis in sorted({axis for share in self.values() for axis in share.divided_over}):
            group = self._mesh.axis(axis).group
            found[axis] = [{} for _ in range(group.size())]
            dist.all_gather_object(found[axis], self._shares, group=group)
        return found


def _summed_over_tp(model: nn.Module, declared: Mapping[str, Share]) -> dict[str, Share]:
    """The shares of parameters that all ranks hold, though they share the matrices around them.

    Each rank computes with tokens or with columns of its own, and so has some of the terms of their gradients. FSDP2
    sums those of experts, for which these ranks are ranks with other tokens.
    """
    of_experts = {
        parameter for module in model.modules() if isinstance(module, Experts) for parameter in module.parameters()
    }
    return {
        name: Share(parameter.shape[0], ((0, parameter.shape[0]),), summed_over=(AXIS,))
        for name, parameter in model.named_parameters()
        if name not in declared and parameter not in of_experts
    }
