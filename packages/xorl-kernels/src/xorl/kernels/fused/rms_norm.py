"""RMS norm, alone or after a residual addition, and its gradient. Plain twin: `reference.add_rms_norm`.

Computed in fp32. The sum x + residual is rounded to the dtype of x before it is normalised, the weight is rounded to
the same dtype before the offset is added to it, and each result is rounded once. The weight's gradient is summed in
fp32, within each program and then over programs, in a fixed order, so it is reproducible to the bit.

Shapes: T rows, D width.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from xorl.kernels.fused.arguments import check_norm
from xorl.kernels.fused.device import launch, power_of_2, rows_per_program
from xorl.kernels.fused.partial import sum_of_programs

# Warps per processor in the backward pass: with the loads of the next rows in flight, enough to saturate memory.
WARPS_PER_PROCESSOR = 16
# The next row is prefetched if a row has at most this many bytes per warp; a longer row and the weight would not both
# fit into registers.
MAX_PREFETCHED_BYTES = 1024


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(residual + x, or x if there is no residual; its rms_norm). The weight [D] may have any floating-point dtype.

    In the backward pass, one launch computes the gradient of both addends, including the gradient of the first result.

    Raises ValueError for shapes, dtypes or devices that do not fit.
    """
    check_norm(x, residual, weight, eps)
    if residual is None:
        results = _NormWithInput.apply(x, weight, eps, offset)
        assert isinstance(results, tuple)
        return results
    summed, normed, _ = _add_rms_norm(x, residual, weight, eps, offset)
    return summed, normed


@torch.library.custom_op("xorl::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """(normed, 1 / rms of each row [T] fp32)."""
    x = x.contiguous()
    normed = torch.empty_like(x)
    rstd = _launch_forward(x, None, weight, eps, offset, None, normed)
    return normed, rstd


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    return _like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("xorl::add_rms_norm", mutates_args=())
def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum, normed, 1 / rms of each row [T] fp32)."""
    x, residual = x.contiguous(), residual.contiguous()
    summed, normed = torch.empty_like(x), torch.empty_like(x)
    rstd = _launch_forward(x, residual, weight, eps, offset, summed, normed)
    return summed, normed, rstd


@_add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x), _like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("xorl::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    grad_normed: Tensor, grad_summed: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """(gradient of x, gradient of weight); `grad_summed`, the direct gradient of x, is added to the first."""
    grad_normed, x = grad_normed.contiguous(), x.contiguous()
    grad_summed = None if grad_summed is None else grad_summed.contiguous()
    width = x.shape[-1]
    num_rows = x.numel() // width
    num_warps = _num_warps(width)
    rows = rows_per_program(num_rows, WARPS_PER_PROCESSOR // num_warps)
    num_programs = math.ceil(num_rows / rows)
    grad_x = torch.empty_like(x)
    partial = torch.empty(num_programs, width, dtype=torch.float32, device=x.device)
    if num_programs:
        launch(
            _backward,
            (num_programs,),
            grad_normed,
            grad_normed if grad_summed is None else grad_summed,
            x,
            weight,
            rstd,
            grad_x,
            partial,
            num_rows,
            rows,
            OFFSET=offset,
            WIDTH=width,
            HAS_GRAD_SUMMED=grad_summed is not None,
            PREFETCHES=width * x.element_size() <= MAX_PREFETCHED_BYTES * num_warps,
            BLOCK=power_of_2(width),
            num_warps=num_warps,
        )
    return grad_x, sum_of_programs(partial, weight.dtype)


@_rms_norm_backward.register_fake
def _(
    grad_normed: Tensor, grad_summed: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    return _like(x), torch.empty_like(weight)


class _NormWithInput(torch.autograd.Function):
    """(x, its norm). If callers use the first result instead of x, the backward kernel adds up the gradients of x."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        normed, rstd = _rms_norm(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset  # pyright: ignore[reportAttributeAccessIssue] read by backward
        ctx.set_materialize_grads(False)
        return x.view_as(x), normed

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] the base class takes any number of arguments
        ctx: FunctionCtx, grad_x: Tensor | None, grad_normed: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        x, weight, rstd = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue] set by save_for_backward
        offset: float = ctx.offset  # pyright: ignore[reportAttributeAccessIssue] set by forward
        return *_rms_norm_backward(grad_normed, grad_x, x, weight, rstd, offset), None, None


def _save_sum(
    ctx: FunctionCtx, inputs: tuple[Tensor, Tensor, Tensor, float, float], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    summed, _, rstd = output
    ctx.save_for_backward(summed, inputs[2], rstd)
    ctx.offset = inputs[4]  # pyright: ignore[reportAttributeAccessIssue] read by _differentiate_sum


def _differentiate_sum(
    ctx: FunctionCtx, grad_summed: Tensor, grad_normed: Tensor, _: Tensor
) -> tuple[Tensor, Tensor, Tensor, None, None]:
    summed, weight, rstd = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue] set by save_for_backward
    offset: float = ctx.offset  # pyright: ignore[reportAttributeAccessIssue] set by _save_sum
    grad, grad_weight = _rms_norm_backward(grad_normed, grad_summed, summed, weight, rstd, offset)
    return grad, grad, grad_weight, None, None


_add_rms_norm.register_autograd(_differentiate_sum, setup_context=_save_sum)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _num_warps(width: int) -> int:
    """Enough warps for 16 values of a row per thread, between 1 and 16."""
    return min(max(power_of_2(width) // 512, 1), 16)


def _launch_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    offset: float,
    summed: Tensor | None,
    normed: Tensor,
) -> Tensor:
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if x.numel():
        launch(
            _forward,
            (rstd.numel(),),
            x,
            x if residual is None else residual,
            weight,
            x if summed is None else summed,
            normed,
            rstd,
            eps,
            OFFSET=offset,
            WIDTH=x.shape[-1],
            HAS_RESIDUAL=residual is not None,
            BLOCK=power_of_2(x.shape[-1]),
            num_warps=_num_warps(x.shape[-1]),
        )
    return rstd


@triton.jit
def _forward(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    summed_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    eps: float,
    OFFSET: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < WIDTH
    offsets = row * WIDTH + columns
    x = tl.load(x_ptr + offsets, mask=is_inside, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + offsets, mask=is_inside, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(summed_ptr + offsets, rounded, mask=is_inside)
        x = rounded.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    weight = tl.load(weight_ptr + columns, mask=is_inside, other=0.0).to(dtype).to(tl.float32) + OFFSET
    tl.store(normed_ptr + offsets, (x * rstd * weight).to(dtype), mask=is_inside)
    tl.store(rstd_ptr + row, rstd)


@triton.jit(do_not_specialize=["num_rows", "rows_of_program"])
def _backward(
    grad_normed_ptr: tl.tensor,
    grad_summed_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    grad_x_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    num_rows: int,
    rows_of_program: int,
    OFFSET: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_GRAD_SUMMED: tl.constexpr,
    PREFETCHES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < WIDTH
    dtype = grad_x_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue] it is a pointer
    grad_weight = tl.zeros([BLOCK], tl.float32)
    start = program * rows_of_program
    end = tl.minimum(start + rows_of_program, num_rows)
    if PREFETCHES:
        weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(dtype).to(tl.float32) + OFFSET
        x, grad_normed, grad_summed, rstd = _load_row(
            x_ptr, grad_normed_ptr, grad_summed_ptr, rstd_ptr, start, start < end, WIDTH, HAS_GRAD_SUMMED, BLOCK
        )
    row = start
    while row < end:
        # Loaded before the sum over the row, which synchronises the warps, so that memory stays busy meanwhile.
        row_to_load = row + 1 if PREFETCHES else row
        is_row = row_to_load < end
        loaded = _load_row(
            x_ptr, grad_normed_ptr, grad_summed_ptr, rstd_ptr, row_to_load, is_row, WIDTH, HAS_GRAD_SUMMED, BLOCK
        )
        if not PREFETCHES:
            x, grad_normed, grad_summed, rstd = loaded
        normed = x.to(tl.float32) * rstd
        grad_x = grad_normed.to(tl.float32)
        grad_weight += grad_x * normed
        if not PREFETCHES:
            weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(dtype).to(tl.float32) + OFFSET
        grad_x *= weight
        grad_x = (grad_x - normed * (tl.sum(grad_x * normed, axis=0) / WIDTH)) * rstd
        if HAS_GRAD_SUMMED:
            grad_x += grad_summed.to(tl.float32)
        tl.store(grad_x_ptr + row * WIDTH + columns, grad_x.to(dtype), mask=is_column)
        if PREFETCHES:
            x, grad_normed, grad_summed, rstd = loaded
        row += 1
    tl.store(partial_ptr + program * WIDTH + columns, grad_weight, mask=is_column)


@triton.jit
def _load_row(
    x_ptr: tl.tensor,
    grad_normed_ptr: tl.tensor,
    grad_summed_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    row: tl.tensor,
    is_row: tl.tensor,
    WIDTH: tl.constexpr,
    HAS_GRAD_SUMMED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """x, the gradients of the normed result and of the sum, [BLOCK] each, and 1 / rms.

    The gradient of the sum is a placeholder unless HAS_GRAD_SUMMED.
    """
    columns = tl.arange(0, BLOCK)
    is_inside = (columns < WIDTH) & is_row
    offsets = row * WIDTH + columns
    rstd = tl.load(rstd_ptr + row, mask=is_row, other=0.0)
    x = tl.load(x_ptr + offsets, mask=is_inside, other=0.0)
    grad_normed = tl.load(grad_normed_ptr + offsets, mask=is_inside, other=0.0)
    grad_summed = rstd
    if HAS_GRAD_SUMMED:
        grad_summed = tl.load(grad_summed_ptr + offsets, mask=is_inside, other=0.0)
    return x, grad_normed, grad_summed, rstd
