"""A frozen linear layer plus a low-rank product, which compiled code accumulates in place.

Shapes: T tokens, I input features, O output features, R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F


def adapted_linear(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor) -> Tensor:
    """x @ weight.T + bias + (x @ down.T) @ up.T, [T, I] to [T, O]; weight [O, I] and bias are treated as constants.

    All tensors have the same dtype; products accumulate as torch's products do. A separate addition would write the
    low-rank product to memory and read both products again, in both passes. Here compiled code accumulates the low-rank
    product directly into the other one.
    """
    y = _AdaptedLinear.apply(x, weight, bias, down, up)
    assert isinstance(y, Tensor)
    return y


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor) -> Tensor:
        low = x @ down.t()  # [T, R]
        ctx.save_for_backward(x, weight, down, up, low)
        return add_product(F.linear(x, weight, bias), low, up.t())

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] the decorator has no types
        ctx: _Context, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight, down, up, low = ctx.saved_tensors
        grad_low = grad @ up  # [T, R]
        grad_x = add_product(grad @ weight, grad_low, down) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, grad_low.t() @ x, grad.t() @ low


def add_product(summand: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """summand + a @ b; compiled code may reuse the memory of `summand`."""
    if not torch.compiler.is_compiling():
        # Not in place: activation recomputation may have saved the summand.
        return torch.addmm(summand, a, b)
    _add_in_place(summand, a, b)
    return summand


@torch.library.custom_op("xorl::add_product_", mutates_args=("out",))
def _add_in_place(out: Tensor, a: Tensor, b: Tensor) -> None:
    out.addmm_(a, b)


@_add_in_place.register_fake
def _(out: Tensor, a: Tensor, b: Tensor) -> None:
    return None
