"""Norms of the heads of recurrent layers, in plain torch.

They compute in fp32 (fp64 for fp64 inputs) and round once. The backward pass computes everything again from the inputs,
which alone are kept: autograd would keep several copies in fp32.

Shapes: T tokens, H heads, or groups of them, C channels of a head.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

# Added to the sum of squares, as by the authors of gated delta nets.
UNIT_EPS = 1e-6


def unit_norm(x: Tensor, scale: float) -> Tensor:
    """scale * x / sqrt(sum of squares + 1e-6) over the last dimension, in the dtype of x."""
    out = _UnitNorm.apply(x, scale)
    assert isinstance(out, Tensor)
    # Not inside the function: torch.compile loses the gradient of one that ends in a cast without effect.
    return out.to(x.dtype)


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight * silu(gate) over the last dimension, in the dtype of x.

    Args:
        x, gate: [T, H, C].
        weight: [C], in any floating-point dtype.
        eps: added to the mean of squares.
    """
    out = _GatedNorm.apply(x, weight, gate, eps)
    assert isinstance(out, Tensor)
    return out.to(x.dtype)


def norm_of_gated(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """y / rms(y) * weight with y = x * silu(gate), over the last dimension, in the dtype of x.

    Args:
        x, gate: [T, H, C].
        weight: [H, C], in any floating-point dtype.
        eps: added to the mean of squares.
    """
    out = _NormOfGated.apply(x, weight, gate, eps)
    assert isinstance(out, Tensor)
    return out.to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    scale: float
    eps: float


class _UnitNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        wide = _wide(x)
        return wide * (scale * (wide.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt())

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        wide = _wide(x)
        factor = (wide.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt()
        along = (grad * wide).sum(-1, keepdim=True) * factor.square()
        return (ctx.scale * factor * (grad - wide * along)).to(x.dtype), None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, gate)
        ctx.eps = eps
        wide = _wide(x)
        normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        return normed * weight.to(wide.dtype) * F.silu(gate.to(wide.dtype))

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, gate = ctx.saved_tensors
        wide = _wide(x)
        wide_weight, wide_gate = weight.to(wide.dtype), gate.to(wide.dtype)
        factor = (wide.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
        normed, sigmoid = wide * factor, wide_gate.sigmoid()
        grad_gate = grad * normed * wide_weight * sigmoid * (1 + wide_gate * (1 - sigmoid))
        grad = grad * wide_gate * sigmoid  # of the norm's output
        grad_weight = (grad * normed).sum(tuple(range(grad.dim() - 1)))
        grad = grad * wide_weight
        grad_x = factor * (grad - normed * (grad * normed).mean(-1, keepdim=True))
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), grad_gate.to(gate.dtype), None


class _NormOfGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, gate)
        ctx.eps = eps
        gated = _wide(x) * F.silu(_wide(gate))
        return gated * (gated.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(gated.dtype)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, gate = ctx.saved_tensors
        wide, wide_gate = _wide(x), _wide(gate)
        sigmoid = wide_gate.sigmoid()
        silu = wide_gate * sigmoid
        gated = wide * silu
        factor = (gated.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
        normed = gated * factor
        grad_weight = (grad * normed).sum(0)
        grad = grad * weight.to(wide.dtype)
        grad = factor * (grad - normed * (grad * normed).mean(-1, keepdim=True))  # of the gated values
        grad_gate = grad * wide * sigmoid * (1 + wide_gate * (1 - sigmoid))
        return (grad * silu).to(x.dtype), grad_weight.to(weight.dtype), grad_gate.to(gate.dtype), None
