"""fp8 copies of weights: computed once after each parameter update, and gathered in fp8 if sharded.

Only the `tensorwise` recipe uses such copies. With row-wise scales, the gradient of the input would need a second copy
with column-wise scales; so `rowwise` gathers in the compute dtype and casts the gathered weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from xorl.core.nn.fp8 import Fp8Linear
from xorl.core.parallel.fsdp import sharded_parameters
from xorl.core.shards import shard_groups
from xorl.core.torch_private import FSDPParam, set_gather_hooks, set_unsharded, sharded_values, shares_storage
from xorl.kernels.quant.fp8 import E4M3, cast_into_
from xorl.kernels.torch_private import foreach_norm


@dataclass(frozen=True)
class _Fp8Copy:
    """A weight, or this rank's rows [R, I] of it, with buffers for their fp8 copy and for the weight's scale."""

    source: nn.Parameter | FSDPParam
    values_fp8: Tensor
    descale: Tensor

    def values(self) -> Tensor:
        """The current values of the rows. Shards are padded with zeros to their common length."""
        if isinstance(self.source, FSDPParam):
            return sharded_values(self.source).view(self.values_fp8.shape)
        return self.source


class Fp8Weights:
    """Keeps the fp8 copies of a parallelized model's weights current, with one refresh per update.

    Before a forward pass, the copies are recomputed if the version counter of any weight has changed or `invalidate`
    was called. Scales of sharded weights are those of the whole matrices, reduced in one collective. Every rank updates
    its parameters at the same points, so all ranks call the collective together.
    """

    def __init__(self, model: nn.Module) -> None:
        sharded = {module: found for (module, name), found in sharded_parameters(model).items() if name == "weight"}
        linears = [m for m in model.modules() if isinstance(m, Fp8Linear) and m.recipe == "tensorwise"]
        self._copies = [
            _gather_in_fp8(linear, sharded[linear]) if linear in sharded else _allocate_fp8_copy(linear)
            for linear in linears
        ]
        groups = {tuple(shard_groups(linear.weight)) for linear in linears}
        assert len(groups) <= 1, "one collective reduces the scales of all weights"
        self._groups = groups.pop() if groups else ()
        self._versions: list[int] = []
        # Runs before FSDP2's own hook, whose streams wait for the work queued so far.
        model.register_forward_pre_hook(lambda *_: self.refresh(), prepend=True)

    def invalidate(self) -> None:
        """Force a refresh, after parameters changed in a way that their version counters do not record."""
        self._versions = []

    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute the copies if they are out of date; collective if weights are sharded."""
        weights = [copy.values() for copy in self._copies]
        versions = [weight._version for weight in weights]
        if versions == self._versions or not weights:
            return
        self._versions = versions
        largest = torch.stack(list(foreach_norm(weights, float("inf")))).float()
        for group in self._groups:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        for copy, weight, amax in zip(self._copies, weights, largest, strict=True):
            cast_into_(weight, amax, copy.values_fp8, copy.descale)


def _allocate_fp8_copy(linear: Fp8Linear) -> _Fp8Copy:
    """Allocate the fp8 copy of an unsharded weight."""
    weight = linear.weight
    linear.weight_fp8 = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
    linear.weight_descale = torch.empty((), dtype=torch.float32, device=weight.device)
    return _Fp8Copy(weight, linear.weight_fp8, linear.weight_descale)


def _gather_in_fp8(linear: Fp8Linear, parameter: FSDPParam) -> _Fp8Copy:
    """Make FSDP2 gather the fp8 copy of a shard instead of its values.

    The unsharded parameter is a placeholder with the right shape and dtype that receives the gradient; it is all NaN.
    """
    # Initialisation may have replaced the sharded parameter; this also pads shards to equal length.
    parameter.reset_sharded_param()
    device = sharded_values(parameter).device
    shard_fp8 = torch.zeros(parameter.padded_sharded_param_size, dtype=E4M3, device=device)
    dtype = parameter.mp_policy.param_dtype or linear.weight.dtype
    linear.weight_descale = torch.empty((), dtype=torch.float32, device=device)
    placeholder = torch.full((1, 1), float("nan"), dtype=dtype, device=device)

    def pre_all_gather(
        mesh: DeviceMesh, size: torch.Size, stride: tuple[int, ...], module: nn.Module, policy: MixedPrecisionPolicy
    ) -> tuple[tuple[Tensor, ...], None]:
        return (shard_fp8.view(torch.uint8),), None  # as bytes, which every communication library supports

    def post_all_gather(
        gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> None:
        (rows,) = gathered  # [ranks * R, I], in a buffer that FSDP2 frees and refills
        if linear.weight_fp8 is None:
            linear.weight_fp8 = rows[: linear.out_features].view(E4M3)
        assert shares_storage(linear.weight_fp8, rows), "FSDP2 reuses its buffer"

    set_gather_hooks(parameter, pre_all_gather, post_all_gather)
    set_unsharded(parameter, placeholder)
    return _Fp8Copy(parameter, shard_fp8, linear.weight_descale)
