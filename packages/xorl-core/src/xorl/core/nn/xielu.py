"""xIELU, an activation function with two trained scalars (arXiv:2411.13010).

It computes in fp32, and in the backward pass from its input alone: the steps of the plain formula would keep six
tensors of the size of the input, in fp32, for autograd.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from xorl.core.nn.roles import Role

_BETA = 0.5
# Of the slopes themselves, which are softplus functions of the parameters.
_INITIAL_SLOPE = 0.8


class XIELU(nn.Module):
    """p x^2 + beta x for x > 0, else n (exp(min(x, eps)) - 1 - x) + beta x, elementwise in the dtype of x.

    p = softplus(alpha_p) and n = beta + softplus(alpha_n), so that training keeps both positive.
    """

    roles: ClassVar[Mapping[str, Role]] = MappingProxyType(
        {"alpha_p": "scalar", "alpha_n": "scalar", "beta": "constant", "eps": "constant"}
    )
    initial_values: ClassVar[Mapping[str, float]] = MappingProxyType(
        {
            "alpha_p": math.log(math.expm1(_INITIAL_SLOPE)),
            "alpha_n": math.log(math.expm1(_INITIAL_SLOPE - _BETA)),
            "beta": _BETA,
            "eps": -1e-6,
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1))
        self.alpha_n = nn.Parameter(torch.empty(1))
        self.beta = nn.Parameter(torch.empty(1), requires_grad=False)
        self.eps = nn.Parameter(torch.empty(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        alpha_p, alpha_n, beta, eps = (
            value.to(x.dtype).to(wide) for value in (self.alpha_p, self.alpha_n, self.beta, self.eps)
        )
        out = _XIELU.apply(x, F.softplus(alpha_p), beta + F.softplus(alpha_n), beta, eps)
        assert isinstance(out, Tensor)
        # Not inside the function: torch.compile loses the gradient of one that ends in a cast without effect.
        return out.to(x.dtype)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]


class _XIELU(torch.autograd.Function):
    """Of x in any dtype, and p, n, beta and eps, [1] in the dtype of the computation and of the output."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, p: Tensor, n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
        ctx.save_for_backward(x, p, n, beta, eps)
        wide = x.to(p.dtype)
        negative = (torch.expm1(torch.minimum(wide, eps)) - wide) * n
        return torch.where(wide > 0, p * wide.square(), negative) + beta * wide

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, p, n, beta, eps = ctx.saved_tensors
        [grad], wide = grads, x.to(p.dtype)
        is_positive, decay = wide > 0, torch.expm1(torch.minimum(wide, eps))
        # From eps on, the exponential is that of a constant.
        slope = torch.where(is_positive, 2 * p * wide, torch.where(wide < eps, decay, -1.0) * n)
        grad_p = torch.where(is_positive, grad * wide.square(), 0.0).sum().view(1)
        grad_n = torch.where(is_positive, 0.0, grad * (decay - wide)).sum().view(1)
        return (grad * (slope + beta)).to(x.dtype), grad_p, grad_n, None, None
