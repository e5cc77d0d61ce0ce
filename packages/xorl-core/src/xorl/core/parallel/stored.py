"""Sharding of frozen parameters that keep their dtype: quantised weights are gathered as bytes, corrections in fp32."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from xorl.core.nn.roles import DeclaresRoles, StoresWeight, declared
from xorl.core.parallel.fsdp import sharded_parameters
from xorl.core.torch_private import FSDPParam, set_gather_hooks, sharded_values, shares_storage


def gather_as_stored(model: nn.Module) -> None:
    """Make FSDP2 gather weights in other formats, and corrections, in their own dtype. Call it after initialisation.

    FSDP2 would cast every parameter of a unit to its mixed-precision dtype, even bytes.
    """
    for (module, name), parameter in sharded_parameters(model).items():
        storing, declaring = declared(module, StoresWeight), declared(module, DeclaresRoles)
        is_stored = storing is not None and name in storing.stored
        if is_stored or (declaring is not None and declaring.roles.get(name) == "correction"):
            _gather_uncast(parameter)


def _gather_uncast(parameter: FSDPParam) -> None:
    # Initialisation may have replaced the sharded parameter; this also pads shards to equal length.
    parameter.reset_sharded_param()

    def pre_all_gather(
        mesh: DeviceMesh, size: torch.Size, stride: tuple[int, ...], module: nn.Module, policy: MixedPrecisionPolicy
    ) -> tuple[tuple[Tensor, ...], None]:
        return (sharded_values(parameter).view(parameter.padded_sharded_param_size),), None

    def post_all_gather(
        gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        (whole,) = gathered
        if out is None:
            return whole, (whole,)
        assert shares_storage(out, whole), "FSDP2 reuses its buffer"
        return None

    set_gather_hooks(parameter, pre_all_gather, post_all_gather)
