"""Gradient accumulation in fp32 for half-precision parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from xorl.core.shards import local

HALF_DTYPES = (torch.bfloat16, torch.float16)


class Fp32Accumulation:
    """Accumulates the gradients of half-precision parameters over micro-batches in fp32.

    torch accumulates in the parameters' dtype, and so does FSDP2, whatever its reduce dtype: a bf16 sum of gradients of
    one sign stops growing at about 2**8 times a single gradient. A step of one micro-batch needs no extra memory and
    keeps its gradients in the parameters' dtype; a step of several ends with fp32 gradients.

    The gradients of fp32 parameters beside them are set aside as well: replicas then sum whole gradients over ranks in
    every pass, and would sum earlier ones again.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        has_half = any(parameter.dtype in HALF_DTYPES for parameter in parameters)
        self._parameters = list(parameters) if has_half else []
        self._widened: list[Tensor] = []

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Context manager for the backward pass of one micro-batch, or for a pass that must not see the gradients."""
        # Copy now: gradients that are views of DistributedDataParallel's buckets are overwritten by the next pass.
        earlier = [
            (parameter, parameter.grad.to(torch.float32, copy=True))
            for parameter in self._parameters
            if parameter.grad is not None
        ]
        for parameter, _ in earlier:
            parameter.grad = None
        for parameter in self._widened:
            parameter.grad_dtype = parameter.dtype
        yield
        for parameter, gradient in earlier:
            newest, parameter.grad = parameter.grad, None
            # The dtype that autograd casts gradients to and that assignment to `grad` accepts. During passes, it is the
            # parameter's own dtype.
            parameter.grad_dtype = torch.float32
            parameter.grad = gradient
            if newest is not None:
                local(parameter.grad).add_(local(newest))
        self._widened = [parameter for parameter, _ in earlier]
