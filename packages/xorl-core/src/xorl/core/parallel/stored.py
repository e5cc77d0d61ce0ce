"""Sharding of frozen weights in other storage formats: quantised weights are gathered as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from xorl.core.nn.roles import StoresWeight
from xorl.core.parallel.fsdp import sharded_parameters


@contextmanager
def allow_integer_parameters() -> Iterator[None]:
    """Context manager in which `fully_shard` accepts frozen integer parameters.

    FSDP2 creates each sharded parameter with requires_grad=True, which integers do not support, and only then copies
    the flag of the original. This replaces nn.Parameter in FSDP2's module by a function that checks the dtype.
    """

    # From 2.12 on, FSDP2 also passes requires_grad.
    def make_parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad=requires_grad and data.is_floating_point())

    _fsdp_param.nn = SimpleNamespace(Parameter=make_parameter, Module=nn.Module)
    try:
        yield
    finally:
        _fsdp_param.nn = nn


def gather_as_stored(model: nn.Module) -> None:
    """Make FSDP2 gather the parameters of weights in other formats in their own dtype. Call it after initialisation.

    FSDP2 would cast every parameter of a unit to its mixed-precision dtype, even bytes. It calls `fsdp_pre_all_gather`
    on the local tensor of a sharded parameter to get the tensors to gather, and `fsdp_post_all_gather` with the result;
    here both pass the values through.
    """
    for (module, name), parameter in sharded_parameters(model).items():
        if isinstance(module, StoresWeight) and name in module.stored:
            _gather_uncast(parameter)


def _gather_uncast(parameter: FSDPParam) -> None:
    # Initialisation may have replaced the sharded parameter; this also pads shards to equal length.
    parameter.reset_sharded_param()

    def pre_all_gather(
        mesh: DeviceMesh, size: torch.Size, stride: tuple[int, ...], module: nn.Module, policy: MixedPrecisionPolicy
    ) -> tuple[tuple[Tensor, ...], None]:
        return (parameter._sharded_param_data.view(parameter.padded_sharded_param_size),), None

    def post_all_gather(
        gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        (whole,) = gathered
        if out is None:
            return whole, (whole,)
        assert out.untyped_storage()._cdata == whole.untyped_storage()._cdata, "FSDP2 reuses its buffer"
        return None

    tensor = cast(DTensor, parameter.sharded_param)._local_tensor
    tensor.fsdp_pre_all_gather = pre_all_gather  # pyright: ignore[reportAttributeAccessIssue]
    tensor.fsdp_post_all_gather = post_all_gather  # pyright: ignore[reportAttributeAccessIssue]
    parameter._init_extensions()
