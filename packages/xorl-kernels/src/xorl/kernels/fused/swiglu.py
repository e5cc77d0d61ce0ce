"""silu(gate) * up and its gradient in one pass each, computed in fp32 and rounded once.

Plain twins: `reference.swiglu` and `reference.swiglu_linear`.

Shapes: T tokens, F feed-forward width, D model width.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from xorl.kernels.fused.arguments import check_gate_up
from xorl.kernels.fused.device import launch, power_of_2

BLOCK = 2048
NUM_WARPS = 4


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [..., 2F] -> [..., F]; saves only `gate_up` for the backward pass.

    Raises ValueError for another shape or dtype.
    """
    check_gate_up(gate_up)
    return _swiglu(gate_up)


def swiglu_linear(gate_up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """swiglu(gate_up [T, 2F]) @ weight.T + bias, [T, D]; saves `gate_up` and `weight` [D, F] for the backward pass.

    The weight's gradient needs silu(gate) * up. One kernel of the backward pass reads `gate_up` once for both: it
    computes the gradient of `gate_up`, and writes silu(gate) * up over its input, the gradient of silu(gate) * up. Use
    this in compiled code only: otherwise activation recomputation would repeat the product without needing its result.
    """
    check_gate_up(gate_up)
    y = _SwigluLinear.apply(gate_up, weight, bias)
    assert isinstance(y, Tensor)
    return y


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, gate_up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        return F.linear(_swiglu(gate_up), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] the decorator has no types
        ctx: _Context, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        gate_up, weight = ctx.saved_tensors
        needs_gate_up, needs_weight, needs_bias = ctx.needs_input_grad
        gated = grad @ weight  # [T, F]; holds the gradient until the next line overwrites it
        grad_gate_up = _swiglu_backward_(gated, gate_up) if needs_weight else _swiglu_backward(gated, gate_up)
        return (
            grad_gate_up if needs_gate_up else None,
            grad.t() @ gated if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


@torch.library.custom_op("xorl::swiglu", mutates_args=())
def _swiglu(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    out = torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    width = out.shape[-1]
    if out.numel():
        block = min(BLOCK, power_of_2(width))
        grid = (out.numel() // width, math.ceil(width / block))
        launch(_forward, grid, gate_up, out, WIDTH=width, BLOCK=block, num_warps=NUM_WARPS)
    return out


@_swiglu.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@torch.library.custom_op("xorl::swiglu_backward", mutates_args=())
def _swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of `gate_up`."""
    return _launch_backward(grad.contiguous(), gate_up, makes_output=False)


@torch.library.custom_op("xorl::swiglu_backward_", mutates_args=("grad",))
def _swiglu_backward_(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of `gate_up`; overwrites `grad`, contiguous, with the output of `_swiglu`."""
    assert grad.is_contiguous(), "the kernel overwrites it row by row"
    return _launch_backward(grad, gate_up, makes_output=True)


def _launch_backward(grad: Tensor, gate_up: Tensor, *, makes_output: bool) -> Tensor:
    gate_up = gate_up.contiguous()
    grad_gate_up = torch.empty_like(gate_up)
    width = grad.shape[-1]
    if grad.numel():
        block = min(BLOCK, power_of_2(width))
        grid = (grad.numel() // width, math.ceil(width / block))
        launch(
            _backward,
            grid,
            grad,
            gate_up,
            grad_gate_up,
            WIDTH=width,
            MAKES_OUTPUT=makes_output,
            BLOCK=block,
            num_warps=NUM_WARPS,
        )
    return grad_gate_up


@_swiglu_backward.register_fake
@_swiglu_backward_.register_fake
def _(grad: Tensor, gate_up: Tensor) -> Tensor:
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format)


def _save(ctx: FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _differentiate(ctx: FunctionCtx, grad: Tensor) -> Tensor:
    (gate_up,) = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue] set by save_for_backward
    return _swiglu_backward(grad, gate_up)


_swiglu.register_autograd(_differentiate, setup_context=_save)


@triton.jit
def _forward(gate_up_ptr: tl.tensor, out_ptr: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < WIDTH
    gate_up_ptr += row * 2 * WIDTH
    gate = tl.load(gate_up_ptr + columns, mask=is_inside).to(tl.float32)
    up = tl.load(gate_up_ptr + WIDTH + columns, mask=is_inside).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * WIDTH + columns, out.to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def _backward(
    grad_ptr: tl.tensor,
    gate_up_ptr: tl.tensor,
    grad_gate_up_ptr: tl.tensor,
    WIDTH: tl.constexpr,
    MAKES_OUTPUT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < WIDTH
    gate_up_ptr += row * 2 * WIDTH
    grad_gate_up_ptr += row * 2 * WIDTH
    grad_ptr += row * WIDTH
    grad = tl.load(grad_ptr + columns, mask=is_inside).to(tl.float32)
    gate = tl.load(gate_up_ptr + columns, mask=is_inside).to(tl.float32)
    up = tl.load(gate_up_ptr + WIDTH + columns, mask=is_inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    grad_up = grad * gate * sigmoid
    dtype = grad_gate_up_ptr.dtype.element_ty
    tl.store(grad_gate_up_ptr + columns, grad_gate.to(dtype), mask=is_inside)
    tl.store(grad_gate_up_ptr + WIDTH + columns, grad_up.to(dtype), mask=is_inside)
    if MAKES_OUTPUT:
        out = gate * sigmoid * up
        tl.store(grad_ptr + columns, out.to(grad_ptr.dtype.element_ty), mask=is_inside)
