"""Frozen weights that are kept in another form travel between ranks as they are kept: quantised ones as their bytes."""

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

from xorl.core.nn.layers import Linear
from xorl.core.parallel.fsdp import sharded_parameters


@contextmanager
def sharding_of_bytes() -> Iterator[None]:
    """Let `fully_shard` take frozen parameters of integers.

    It makes each sharded parameter as one that needs a gradient, which integers cannot, and only then asks whether the
    parameter does. So its module gets another nn.Parameter meanwhile, which asks first.
    """

    def parameter(data: Tensor) -> nn.Parameter:
        return nn.Parameter(data, requires_grad=data.is_floating_point())

    _fsdp_param.nn = SimpleNamespace(Parameter=parameter, Module=nn.Module)
    try:
        yield
    finally:
        _fsdp_param.nn = nn


def gather_as_stored(model: nn.Module) -> None:
    """Let FSDP2 gather what `Linear.stored` names in its own dtype, where `model` is sharded; after it was filled.

    FSDP2 would cast every parameter of a unit to the dtype of its mixed precision, bytes too. It asks the local tensor
    of a sharded parameter what to gather (`fsdp_pre_all_gather`) and what to make of the result
    (`fsdp_post_all_gather`): here both are the values themselves.
    """
    for (module, name), parameter in sharded_parameters(model).items():
        if isinstance(module, Linear) and name in module.stored:
            _leave_uncast(parameter)


def _leave_uncast(parameter: FSDPParam) -> None:
    # The filled parameter may be another one than was sharded, and shards of unequal length are padded now.
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
        assert out.untyped_storage()._cdata == whole.untyped_storage()._cdata, "FSDP2 keeps its memory"
        return None

    tensor = cast(DTensor, parameter.sharded_param)._local_tensor
    tensor.fsdp_pre_all_gather = pre_all_gather  # pyright: ignore[reportAttributeAccessIssue]
    tensor.fsdp_post_all_gather = post_all_gather  # pyright: ignore[reportAttributeAccessIssue]
    parameter._init_extensions()
