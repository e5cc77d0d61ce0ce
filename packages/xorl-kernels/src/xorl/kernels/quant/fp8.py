"""Matrices in 8-bit floating point (arXiv:2209.05433) with their scales, and products of them.

A GPU's fp8 matrix units need the contraction axis of both operands to be contiguous. So a matrix that is contracted
along both axes is needed twice: as it is and transposed. One kernel reads the matrix once and writes both copies. This
file has the torch operators and their plain twins, which run on a CPU; the kernels are in `fp8_triton`.

A scale is the largest power of two that keeps the largest absolute value in range. So scaling itself does not round,
and a value that does not underflow is rounded independently of the other values in its tensor. `descale` is the
reciprocal: x is about q * descale. It is NaN if the input is not finite, which makes every product NaN.

Shapes: R rows, C columns, P the rows rounded up to a multiple of 16 (padding holds zeros); M, N, K of a product.
Other shapes and dtypes, and tensors on several devices, raise ValueError.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor

from xorl.kernels import torch_private
from xorl.kernels.arguments import check_floating, check_one_device
from xorl.kernels.quant.formats import SMALLEST_AMAX, TOP_EXPONENT, padded

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

MIN_CAPABILITY = (8, 9)


def fp8_refusal(device: torch.device) -> str | None:
    """The reason why fp8 products cannot run on `device`, or None. A CPU computes the same numbers, slowly."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"fp8 runs on CUDA GPUs and, emulated, on CPUs, not on {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"fp8 matrix units need compute capability 8.9 or later, and this {name} has {major}.{minor}"
    return None


class _Planned:
    """Whether tensors on the CPU stand for those of a GPU that is not there. The compiler can read it."""

    now = False


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Context manager in which tensors of the meta device are multiplied by the operator that a GPU would call."""
    before, _Planned.now = _Planned.now, True
    try:
        yield
    finally:
        _Planned.now = before


def scaled_mm(
    a: Tensor,
    b: Tensor,
    descale_a: Tensor,
    descale_b: Tensor,
    *,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    """(a * descale_a) @ (b * descale_b).T, [M, N], accumulated in fp32 and rounded once.

    With fast accumulation, Hopper's matrix units keep about 14 bits of the running sum instead of adding it to fp32
    every 128 products (arXiv:2412.19437, section 3.3.2). On a GPU, products with row-wise scales are rounded to bf16.

    Args:
        a, b: [M, K] and [N, K], contiguous, fp8; at most one of them may be E5M2. On a GPU, K and N must be multiples
            of 16.
        descale_a, descale_b: fp32, either per matrix, [] each, or per row, [M] and [N].
    """
    _check_product(a, b, descale_a, descale_b, out_dtype)
    by_row = descale_a.dim() == 1
    if a.is_cuda or _Planned.now:
        product = torch_private.scaled_mm(
            a,
            b.t(),
            scale_a=descale_a[:, None] if by_row else descale_a,
            scale_b=descale_b[None, :] if by_row else descale_b,
            out_dtype=torch.bfloat16 if by_row else out_dtype,
            use_fast_accum=fast_accumulation,
        )
    else:
        product = a.float() @ b.float().t() * (descale_a[:, None] if by_row else descale_a) * descale_b
    # If the dtype is already right, `to` would return its argument, so that a compiled autograd.Function would return a
    # tensor that is also an intermediate of its forward. The gradient of such an output is zero (torch 2.11).
    return product if product.dtype == out_dtype else product.to(out_dtype)


def amax(x: Tensor) -> Tensor:
    """The exact largest absolute value of x [R, C], fp32 []."""
    _check_matrix(x)
    return _amax(x)


@torch.library.custom_op("xorl::fp8_amax", mutates_args=())
def _amax(x: Tensor) -> Tensor:
    if x.is_cuda:
        return _triton().amax(x)
    return x.abs().amax().float()


def cast_tensorwise(x: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast x [R, C] with one scale, derived from `amax` []: (q [R, C], descale [])."""
    _check_cast(x, dtype, amax)
    return _cast_tensorwise(x, amax, dtype)


@torch.library.custom_op("xorl::fp8_cast_tensorwise", mutates_args=())
def _cast_tensorwise(x: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    descale = torch.empty((), dtype=torch.float32, device=x.device)
    cast_into_(x, amax, q, descale)
    return q, descale


def cast_tensorwise_both(x: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Cast x [R, C] with one scale, derived from `amax` []: (q [R, C], q transposed [C, P], descale [])."""
    _check_cast(x, dtype, amax)
    return _cast_tensorwise_both(x, amax, dtype)


@torch.library.custom_op("xorl::fp8_cast_tensorwise_both", mutates_args=())
def _cast_tensorwise_both(x: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    if x.is_cuda:
        return _triton().cast_tensorwise_both(x, amax, dtype)
    scale, descale = power_of_two_scale(amax, dtype)
    q = _cast(x, scale, dtype)
    return q, _transposed(q), descale


def cast_rowwise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast x [R, C] with a scale for each row: (q [R, C], descale [R])."""
    _check_cast(x, dtype)
    return _cast_rowwise(x, dtype)


@torch.library.custom_op("xorl::fp8_cast_rowwise", mutates_args=())
def _cast_rowwise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        return _triton().cast_rowwise(x, dtype)
    scale, descale = power_of_two_scale(x.abs().amax(dim=1).float(), dtype)
    return _cast(x, scale[:, None], dtype), descale


def cast_columnwise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast x [R, C] with a scale for each column, and transpose it: (q [C, P], descale [C])."""
    _check_cast(x, dtype)
    return _cast_columnwise(x, dtype)


@torch.library.custom_op("xorl::fp8_cast_columnwise", mutates_args=())
def _cast_columnwise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        return _triton().cast_columnwise(x, dtype)
    scale, descale = power_of_two_scale(x.abs().amax(dim=0).float(), dtype)
    return _transposed(_cast(x, scale, dtype)), descale


def cast_stack_columnwise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast a stack of matrices x [E, R, C], each with a scale for each column: (q transposed [E, C, R], [E, C]).

    It has no gradient, and the compiler does not look into it where it is called, within an operator.
    """
    if x.is_cuda:
        return _triton().cast_stack_columnwise(x, dtype)
    scale, descale = power_of_two_scale(x.abs().amax(dim=1).float(), dtype)
    return _cast(x, scale[:, None, :], dtype).transpose(1, 2).contiguous(), descale


def cast_axiswise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`cast_rowwise` and `cast_columnwise` of x [R, C] in one pass: (q [R, C], [R], q transposed [C, P], [C])."""
    _check_cast(x, dtype)
    return _cast_axiswise(x, dtype)


@torch.library.custom_op("xorl::fp8_cast_axiswise", mutates_args=())
def _cast_axiswise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if x.is_cuda:
        return _triton().cast_axiswise(x, dtype)
    return *_cast_rowwise(x, dtype), *_cast_columnwise(x, dtype)


def transpose(q: Tensor) -> Tensor:
    """Transpose q [R, C], in fp8: [C, P]."""
    if q.dim() != 2 or q.dtype not in (E4M3, E5M2):
        raise ValueError(f"q must be [R, C] in fp8; got {list(q.shape)} in {q.dtype}")
    return _transpose(q)


@torch.library.custom_op("xorl::fp8_transpose", mutates_args=())
def _transpose(q: Tensor) -> Tensor:
    return _triton().transpose(q) if q.is_cuda else _transposed(q)


def cast_into_(x: Tensor, amax: Tensor, q: Tensor, descale: Tensor) -> None:
    """`cast_tensorwise` into existing tensors: q [R, C] of the target dtype, descale fp32 []."""
    _check_cast(x, q.dtype, amax)
    if q.shape != x.shape or descale.dim() or descale.dtype != torch.float32:
        raise ValueError(
            f"q must be {list(x.shape)}, as x, and descale [] in fp32; got {list(q.shape)} and {list(descale.shape)} "
            f"in {descale.dtype}"
        )
    check_one_device(x=x, q=q, descale=descale)
    if x.is_cuda:
        _triton().cast_into_(x, amax, q, descale)
        return
    scale, reciprocal = power_of_two_scale(amax, q.dtype)
    q.copy_(_cast(x, scale, q.dtype))
    descale.copy_(reciprocal)


def power_of_two_scale(amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The largest power of two that keeps values up to `amax` (fp32) in range, and its reciprocal."""
    bits = amax.clamp(min=SMALLEST_AMAX).view(torch.int32)
    mantissa_above = ((bits & 0x7FFFFF) > 0x600000).int()  # above the 1.75 of the format's largest number
    exponent = TOP_EXPONENT[dtype] - ((bits >> 23) - 127) - mantissa_above
    scale = ((exponent + 127) << 23).view(torch.float32)
    descale = ((127 - exponent) << 23).view(torch.float32)
    return scale, torch.where(torch.isfinite(amax), descale, torch.nan)


def _check_matrix(x: Tensor) -> None:
    if not torch.compiler.is_compiling() and (x.dim() != 2 or not x.is_floating_point()):
        raise ValueError(f"x must be [R, C] of floating point; got {list(x.shape)} in {x.dtype}")


def _check_cast(x: Tensor, dtype: torch.dtype, amax: Tensor | None = None) -> None:
    if torch.compiler.is_compiling():
        return
    _check_matrix(x)
    if dtype not in (E4M3, E5M2):
        raise ValueError(f"dtype must be {E4M3} or {E5M2}; got {dtype}")
    if amax is not None:
        if amax.dim() or amax.dtype != torch.float32:
            raise ValueError(f"amax must be [] in fp32; got {list(amax.shape)} in {amax.dtype}")
        check_one_device(x=x, amax=amax)


def _check_product(a: Tensor, b: Tensor, descale_a: Tensor, descale_b: Tensor, out_dtype: torch.dtype) -> None:
    if torch.compiler.is_compiling():
        return
    dtypes = {a.dtype, b.dtype}
    fits = a.dim() == b.dim() == 2 and a.shape[1:] == b.shape[1:] and a.is_contiguous() and b.is_contiguous()
    if not fits or dtypes not in ({E4M3}, {E4M3, E5M2}):
        raise ValueError(
            f"a must be [M, K] and b [N, K], contiguous, in fp8 and not both in E5M2; got {list(a.shape)} in "
            f"{a.dtype} and {list(b.shape)} in {b.dtype}"
        )
    shapes = descale_a.shape, descale_b.shape
    if shapes not in (((), ()), (a.shape[:1], b.shape[:1])) or {descale_a.dtype, descale_b.dtype} != {torch.float32}:
        raise ValueError(
            f"descale_a and descale_b must be [] each, or [{a.shape[0]}] and [{b.shape[0]}], in fp32; got "
            f"{list(descale_a.shape)} in {descale_a.dtype} and {list(descale_b.shape)} in {descale_b.dtype}"
        )
    check_floating("out_dtype", out_dtype)
    check_one_device(a=a, b=b, descale_a=descale_a, descale_b=descale_b)


def _cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() * scale).to(dtype)


def _transposed(q: Tensor) -> Tensor:
    out = q.new_zeros((q.shape[1], padded(q.shape[0])))
    out[:, : q.shape[0]] = q.t()
    return out


def _triton() -> ModuleType:
    # Imported on first use: CPU builds of torch may not have Triton.
    from xorl.kernels.quant import fp8_triton  # noqa: PLC0415

    return fp8_triton


@_amax.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


@_cast_tensorwise.register_fake
def _(x: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), amax.new_empty(())


@_cast_tensorwise_both.register_fake
def _(x: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), _fake_transposed(x, dtype), amax.new_empty(())


@_cast_rowwise.register_fake
def _(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:1], dtype=torch.float32)


@_cast_columnwise.register_fake
def _(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _fake_transposed(x, dtype), x.new_empty(x.shape[1:], dtype=torch.float32)


@_cast_axiswise.register_fake
def _(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    by_row = x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:1], dtype=torch.float32)
    return *by_row, _fake_transposed(x, dtype), x.new_empty(x.shape[1:], dtype=torch.float32)


@_transpose.register_fake
def _(q: Tensor) -> Tensor:
    return _fake_transposed(q, q.dtype)


def _fake_transposed(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[1], padded(x.shape[0])), dtype=dtype)
