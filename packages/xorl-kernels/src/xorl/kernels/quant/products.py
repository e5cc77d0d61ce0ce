"""Products with quantised weights as torch operators; each one dequantises the weight and discards it afterwards.

The forward product and the product for the input's gradient are one operator each, including the dequantisation.
Otherwise the compiler would dequantise only in the forward pass and keep the weight in memory for the backward pass.
The products are torch's own, in the dtype of x.

Shapes: T tokens, O output features, I input features; codes, scales and global_scale as in `QuantScheme.stored`.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from xorl.kernels.arguments import check_floating, check_one_device
from xorl.kernels.low_rank import add_product, check_low_rank
from xorl.kernels.quant.device import QuantFormat
from xorl.kernels.quant.noise import WeightNoise
from xorl.kernels.quant.weights import QuantizedWeight, QuantScheme, dequantize_stored, num_columns


def quantized_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    quant_format: str,
    group_size: int,
    out_features: int,
    noise: Tensor | None = None,
    noise_alpha: float = 0.0,
) -> Tensor:
    """x [T, I] times the transposed weight: [T, O] in the dtype of x, differentiable in x, once.

    Args:
        x: [T, I].
        codes, scales, global_scale: the fields of a QuantizedWeight.
        quant_format, group_size: those of its QuantScheme.
        out_features: O.
        noise, noise_alpha: the `state` and `alpha` of a WeightNoise to add to the weight. None adds none.

    Raises ValueError for a scheme that does not exist, and if the fields or x do not fit a weight [O, I].
    """
    _check_input(x, codes, quant_format)
    _check_stored(QuantizedWeight(codes, scales, global_scale), quant_format, group_size, out_features, noise)
    return _quantized_linear(x, codes, scales, global_scale, quant_format, group_size, out_features, noise, noise_alpha)


@torch.library.custom_op("xorl::quantized_linear", mutates_args=())
def _quantized_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    quant_format: str,
    group_size: int,
    out_features: int,
    noise: Tensor | None,
    noise_alpha: float,
) -> Tensor:
    weight = _dequantized(
        codes,
        scales,
        global_scale,
        quant_format,
        group_size,
        out_features,
        x.dtype,
        noise,
        noise_alpha,
    )
    return x @ weight.t()


@torch.library.custom_op("xorl::quantized_linear_grad", mutates_args=())
def quantized_linear_grad(
    grad: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    quant_format: str,
    group_size: int,
    in_features: int,
    noise: Tensor | None,
    noise_alpha: float,
) -> Tensor:
    """The gradient [T, I] of x, given the gradient [T, O] of the output."""
    weight = _dequantized(
        codes,
        scales,
        global_scale,
        quant_format,
        group_size,
        grad.shape[1],
        grad.dtype,
        noise,
        noise_alpha,
    )
    return grad @ weight


def dequantized(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    quant_format: str,
    group_size: int,
    out_features: int,
    dtype: torch.dtype,
    noise: Tensor | None = None,
    noise_alpha: float = 0.0,
) -> Tensor:
    """The weight [O, I] in `dtype`; arguments and errors as for `quantized_linear`."""
    check_floating("dtype", dtype)
    _check_stored(QuantizedWeight(codes, scales, global_scale), quant_format, group_size, out_features, noise)
    return _dequantized(codes, scales, global_scale, quant_format, group_size, out_features, dtype, noise, noise_alpha)


@torch.library.custom_op("xorl::dequantized", mutates_args=())
def _dequantized(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    quant_format: str,
    group_size: int,
    out_features: int,
    dtype: torch.dtype,
    noise: Tensor | None,
    noise_alpha: float,
) -> Tensor:
    scheme = QuantScheme(cast(QuantFormat, quant_format), group_size)
    weight = QuantizedWeight(codes, scales, global_scale)
    added = None if noise is None else WeightNoise(noise_alpha, noise)
    return dequantize_stored(scheme, weight, out_features, dtype, added)


def adapted_quantized_linear(
    x: Tensor,
    down: Tensor,
    up: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    quant_format: str,
    group_size: int,
    out_features: int,
    noise: Tensor | None = None,
    noise_alpha: float = 0.0,
) -> Tensor:
    """`quantized_linear` plus (x @ down.T) @ up.T, for down [R, I] and up [O, R] in the dtype of x.

    As in `xorl.kernels.low_rank`, compiled code needs no extra pass over memory for the addition.
    """
    _check_input(x, codes, quant_format)
    _check_stored(QuantizedWeight(codes, scales, global_scale), quant_format, group_size, out_features, noise)
    check_low_rank(x, out_features, down, up)
    y = _AdaptedQuantizedLinear.apply(
        x, down, up, codes, scales, global_scale, quant_format, group_size, out_features, noise, noise_alpha
    )
    assert isinstance(y, Tensor)
    return y


def _check_input(x: Tensor, codes: Tensor, quant_format: str) -> None:
    """Raise ValueError for an input that does not have the weight's columns."""
    if torch.compiler.is_compiling():
        return
    columns = num_columns(codes, quant_format)
    if not x.is_floating_point() or x.dim() != 2 or x.shape[1] != columns:
        raise ValueError(f"x must be [T, {columns}], of floating point; got {x.dtype} {list(x.shape)}")
    check_one_device(x=x, codes=codes)


def _check_stored(
    weight: QuantizedWeight, quant_format: str, group_size: int, out_features: int, noise: Tensor | None
) -> None:
    """Raise ValueError for fields that are not those of a weight [O, I]. Compiled code has been checked before."""
    if torch.compiler.is_compiling():
        return
    QuantScheme(cast(QuantFormat, quant_format), group_size).check_stored(weight, out_features)
    check_one_device(codes=weight.codes, noise=noise)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor | None, ...]
    needs_input_grad: tuple[bool, ...]
    scheme: tuple[str, int]
    alpha: float


def _save(ctx: _Context, inputs: tuple, output: Tensor) -> None:
    _, codes, scales, global_scale, quant_format, group_size, _, noise, alpha = inputs
    ctx.save_for_backward(codes, scales, global_scale, noise)
    ctx.scheme, ctx.alpha = (quant_format, group_size), alpha


def _differentiate(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
    codes, scales, global_scale, noise = ctx.saved_tensors
    assert codes is not None
    assert scales is not None
    width = num_columns(codes, ctx.scheme[0])
    grad_x = quantized_linear_grad(grad, codes, scales, global_scale, *ctx.scheme, width, noise, ctx.alpha)
    return grad_x, *(None,) * 8


class _AdaptedQuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        x: Tensor,
        down: Tensor,
        up: Tensor,
        codes: Tensor,
        scales: Tensor,
        global_scale: Tensor | None,
        quant_format: str,
        group_size: int,
        out_features: int,
        noise: Tensor | None,
        noise_alpha: float,
    ) -> Tensor:
        low = x @ down.t()  # [T, R]
        # torch also accepts None here, unlike its type annotations.
        ctx.save_for_backward(x, down, up, low, codes, scales, cast(Tensor, global_scale), cast(Tensor, noise))
        ctx.scheme, ctx.alpha = (quant_format, group_size), noise_alpha
        y = _quantized_linear(
            x, codes, scales, global_scale, quant_format, group_size, out_features, noise, noise_alpha
        )
        return add_product(y, low, up.t())

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] the decorator has no types
        ctx: _Context, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, down, up, low, codes, scales, global_scale, noise = cast(tuple[Tensor, ...], ctx.saved_tensors)
        grad_low = grad @ up  # [T, R]
        grad_x = None
        if ctx.needs_input_grad[0]:
            width = num_columns(codes, ctx.scheme[0])
            grad_x = quantized_linear_grad(grad, codes, scales, global_scale, *ctx.scheme, width, noise, ctx.alpha)
            grad_x = add_product(grad_x, grad_low, down)
        return grad_x, grad_low.t() @ x, grad.t() @ low, *(None,) * 8


_quantized_linear.register_autograd(_differentiate, setup_context=_save)


@_quantized_linear.register_fake
def _(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    quant_format: str,
    group_size: int,
    out_features: int,
    noise: Tensor | None,
    noise_alpha: float,
) -> Tensor:
    return x.new_empty((x.shape[0], out_features))


@quantized_linear_grad.register_fake
def _(
    grad: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    quant_format: str,
    group_size: int,
    in_features: int,
    noise: Tensor | None,
    noise_alpha: float,
) -> Tensor:
    return grad.new_empty((grad.shape[0], in_features))


@_dequantized.register_fake
def _(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    quant_format: str,
    group_size: int,
    out_features: int,
    dtype: torch.dtype,
    noise: Tensor | None,
    noise_alpha: float,
) -> Tensor:
    return codes.new_empty((out_features, num_columns(codes, quant_format)), dtype=dtype)
