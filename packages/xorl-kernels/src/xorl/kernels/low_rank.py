"""A frozen linear layer plus a low-rank product, which compiled code accumulates in place.

Shapes: T tokens, I input features, O output features, R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from xorl.kernels.arguments import check_one_device


def adapted_linear(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor) -> Tensor:
    """x @ weight.T + bias + (x @ down.T) @ up.T, [T, I] to [T, O]; weight [O, I] and bias are treated as constants.

    All tensors have the same dtype; products accumulate as torch's products do. A separate addition would write the
    low-rank product to memory and read both products again, in both passes. Here compiled code accumulates the low-rank
    product directly into the other one.

    Raises ValueError for shapes, dtypes or devices that do not fit.
    """
    if not torch.compiler.is_compiling():
        if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
            raise ValueError(
                f"x must be [T, I] and weight [O, I] in the same dtype; got {list(x.shape)} in {x.dtype} and "
                f"{list(weight.shape)} in {weight.dtype}"
            )
        if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
            raise ValueError(f"bias must be [{len(weight)}] in {x.dtype}; got {list(bias.shape)} in {bias.dtype}")
        check_one_device(x=x, weight=weight, bias=bias)
    check_low_rank(x, weight.shape[0], down, up)
    y = _AdaptedLinear.apply(x, weight, bias, down, up)
    assert isinstance(y, Tensor)
    return y


def check_low_rank(x: Tensor, out_features: int, down: Tensor, up: Tensor) -> None:
    """Raise ValueError unless down is [R, I] and up [out_features, R], for x [T, I]. Compiled code has been checked."""
    if torch.compiler.is_compiling():
        return
    fits = down.dim() == up.dim() == 2 and down.shape[1] == x.shape[1] and up.shape == (out_features, down.shape[0])
    if not fits or not x.dtype == down.dtype == up.dtype:
        raise ValueError(
            f"down must be [R, {x.shape[1]}] and up [{out_features}, R], in {x.dtype}; got {list(down.shape)} in "
            f"{down.dtype} and {list(up.shape)} in {up.dtype}"
        )
    check_one_device(x=x, down=down, up=up)


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
