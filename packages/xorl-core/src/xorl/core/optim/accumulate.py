"""Gradients of bf16 parameters over several micro-batches: summed in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from xorl.core.optim.local import local

HALF_DTYPES = (torch.bfloat16, torch.float16)


class WideAccumulation:
    """Gradients that join earlier ones in fp32, where the parameters are half precision.

    torch would sum them in the parameters' dtype, FSDP2 too, whatever dtype it reduces in: the sum of n gradients of
    one sign then stands still at about 2**8 times one of them. A step of one micro-batch needs no memory for it, and
    its gradients stay in the parameters' dtype; those of several come out as fp32.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.dtype in HALF_DTYPES]
        self._widened: list[Tensor] = []

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Around the forward and backward passes of one micro-batch."""
        # A copy now: where DistributedDataParallel's buckets hold the gradients, the passes write over the first ones.
        earlier = [(parameter, parameter.grad.float()) for parameter in self._parameters if parameter.grad is not None]
        for parameter, _ in earlier:
            parameter.grad = None
        for parameter in self._widened:
            parameter.grad_dtype = parameter.dtype
        yield
        for parameter, gradient in earlier:
            newest, parameter.grad = parameter.grad, None
            # What a gradient may be assigned in, and what autograd casts to: the parameter's own during the passes.
            parameter.grad_dtype = torch.float32
            parameter.grad = gradient
            if newest is not None:
                local(parameter.grad).add_(local(newest))
        self._widened = [parameter for parameter, _ in earlier]
