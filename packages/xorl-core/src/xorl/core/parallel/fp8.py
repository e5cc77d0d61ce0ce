"""The fp8 copies of weights: made once when the parameters have changed, gathered in fp8 where they are sharded.

Only weights with one scale (`tensorwise`) have such copies. With scales by row the gradient of the input would need a
second copy, by column; so `rowwise` gathers in the compute dtype and casts what was gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from xorl.core.nn.fp8 import Fp8Linear
from xorl.core.parallel.fsdp import shard_groups, sharded_parameters
from xorl.kernels.quant import E4M3, cast_into_


@dataclass(frozen=True)
class _Copy:
    """A weight, or this rank's rows of it [R, I], and the memory for the same rows in fp8 and the weight's scale."""

    source: nn.Parameter | FSDPParam
    values_fp8: Tensor
    descale: Tensor

    def values(self) -> Tensor:
        """The rows as they are now; of a shard, those that pad it to the length of all shards too, which are zero."""
        if isinstance(self.source, FSDPParam):
            return self.source._sharded_param_data.view(self.values_fp8.shape)
        return self.source


class Fp8Weights:
    """Keeps the fp8 copies of a placed model's weights current: once a step, whatever is run in it.

    Copies are made anew before a forward pass of the model if any weight was written to since, which its version
    tells, or `invalidate` was called. The scales of sharded weights are those of the whole matrices, all found by one
    collective: every rank writes to its parameters at the same points, so that all come to it together.
    """

    def __init__(self, model: nn.Module) -> None:
        sharded = {module: found for (module, name), found in sharded_parameters(model).items() if name == "weight"}
        linears = [m for m in model.modules() if isinstance(m, Fp8Linear) and m.recipe == "tensorwise"]
        self._copies = [
            _gather_in_fp8(linear, sharded[linear]) if linear in sharded else _copy_whole(linear) for linear in linears
        ]
        self._groups = shard_groups(linears[0].weight) if linears else []
        self._versions: list[int] = []
        # Before FSDP2's own hook: its streams wait for what was queued until then.
        model.register_forward_pre_hook(lambda *_: self.refresh(), prepend=True)

    def invalidate(self) -> None:
        """Say that parameters have changed, in case they were written to in a way that torch does not count."""
        self._versions = []

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring all copies up to date; collective where weights are sharded."""
        weights = [copy.values() for copy in self._copies]
        versions = [weight._version for weight in weights]
        if versions == self._versions or not weights:
            return
        self._versions = versions
        largest = torch.stack(list(torch._foreach_norm(weights, float("inf")))).float()
        for group in self._groups:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        for copy, weight, amax in zip(self._copies, weights, largest, strict=True):
            cast_into_(weight, amax, copy.values_fp8, copy.descale)


def _copy_whole(linear: Fp8Linear) -> _Copy:
    weight = linear.weight
    linear.weight_fp8 = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
    linear.weight_descale = torch.empty((), dtype=torch.float32, device=weight.device)
    return _Copy(weight, linear.weight_fp8, linear.weight_descale)


def _gather_in_fp8(linear: Fp8Linear, parameter: FSDPParam) -> _Copy:
    """Let FSDP2 gather the fp8 copy of a shard in place of its values.

    FSDP2 asks the local tensor of a sharded parameter for what to gather (`fsdp_pre_all_gather`) and hands the result
    back (`fsdp_post_all_gather`). The two functions are put on that one tensor, which stays a plain one, so optimizers
    and checkpoints see no difference; a tensor subclass would have to answer for each of their operations.

    The gathered parameter is a placeholder: it has the shape and dtype and takes the gradient, but one value, NaN.
    """
    # The filled parameter may be another one than was sharded, and shards of unequal length are padded now.
    parameter.reset_sharded_param()
    device = parameter._sharded_param_data.device
    shard_fp8 = torch.zeros(parameter.padded_sharded_param_size, dtype=E4M3, device=device)
    dtype = parameter.mp_policy.param_dtype or linear.weight.dtype
    linear.weight_descale = torch.empty((), dtype=torch.float32, device=device)
    placeholder = torch.full((1, 1), float("nan"), dtype=dtype, device=device).expand(parameter._orig_size)

    def pre_all_gather(
        mesh: DeviceMesh, size: torch.Size, stride: tuple[int, ...], module: nn.Module, policy: MixedPrecisionPolicy
    ) -> tuple[tuple[Tensor, ...], None]:
        return (shard_fp8.view(torch.uint8),), None  # bytes, which every communication library knows

    def post_all_gather(
        gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> None:
        (rows,) = gathered  # [ranks * R, I], in memory that FSDP2 frees and fills again
        if linear.weight_fp8 is None:
            linear.weight_fp8 = rows[: linear.out_features].view(E4M3)
        assert linear.weight_fp8.untyped_storage()._cdata == rows.untyped_storage()._cdata, "FSDP2 keeps its memory"

    tensor = cast(DTensor, parameter.sharded_param)._local_tensor
    tensor.fsdp_pre_all_gather = pre_all_gather  # pyright: ignore[reportAttributeAccessIssue]
    tensor.fsdp_post_all_gather = post_all_gather  # pyright: ignore[reportAttributeAccessIssue]
    parameter._init_extensions()
    parameter._unsharded_param = nn.Parameter(placeholder, requires_grad=parameter.sharded_param.requires_grad)
    return _Copy(parameter, shard_fp8, linear.weight_descale)
