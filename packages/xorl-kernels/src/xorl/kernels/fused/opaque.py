"""The plain functions as operators, which torch.compile calls without tracing them.

torch.compile keeps fused operations in fp32 and so omits the intermediate roundings of eager torch. With these
operators, compiled training rounds as an inference engine that runs eagerly does. Gradients are those of the plain
functions, compiled or not.
"""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from xorl.kernels.fused import reference
from xorl.kernels.fused.arguments import RopeTables


class _Context(FunctionCtx):
    """Declares the attributes that autograd and `save` set."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    non_tensors: list[object]


def _opaque_operator(function: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    """`function` as an operator. Its tensor arguments must come first, and its result must not alias them."""
    operator = torch.library.custom_op(f"xorl::opaque_{name}", function, mutates_args=())
    operator.register_fake(function)

    def save(ctx: _Context, inputs: tuple[object, ...], output: Tensor) -> None:
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
        ctx.non_tensors = [value for value in inputs if not isinstance(value, Tensor)]

    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            tensors = [
                saved.detach().requires_grad_(needs_grad)
                for saved, needs_grad in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
            ]
            result = function(*tensors, *ctx.non_tensors)
        computed = iter(torch.autograd.grad(result, [tensor for tensor in tensors if tensor.requires_grad], gradient))
        gradients = [next(computed) if tensor.requires_grad else None for tensor in tensors]
        return (*gradients, *(None for _ in ctx.non_tensors))

    operator.register_autograd(backward, setup_context=save)

    @wraps(function)
    def call(*inputs: object) -> Tensor:
        return operator(*inputs)

    return call


def _add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, of the same shape and dtype."""
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(f"y must be {list(x.shape)} in {x.dtype}, as x; got {list(y.shape)} in {y.dtype}")
    return x + y


def _apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """`apply_rope` with the tables as two arguments."""
    return reference.apply_rope(x, (cos, sin), interleaved=interleaved)


def _round_to_bf16(x: Tensor) -> Tensor:
    """x rounded to bf16, in the dtype of x."""
    return x.to(torch.bfloat16, copy=True).to(x.dtype)


add = _opaque_operator(_add, "add")
rms_norm = _opaque_operator(reference.rms_norm, "rms_norm")
rope = _opaque_operator(_apply_rope, "rope")
swiglu = _opaque_operator(reference.swiglu, "swiglu")
round_to_bf16 = _opaque_operator(_round_to_bf16, "round_to_bf16")


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`reference.add_rms_norm`; the compiler cannot fuse the addition into the product that computes x."""
    summed = x if residual is None else add(residual, x)
    return summed, rms_norm(summed, weight, eps, offset)


def apply_rope(x: Tensor, tables: RopeTables, *, interleaved: bool = False) -> Tensor:
    """`reference.apply_rope`."""
    return rope(x, *tables, interleaved)
