"""Triton kernels of nf4, nvfp4 and block_fp8; those modules describe the computations and have the plain twins.

Quantising divides and rounds as in IEEE 754, so codes and scales equal those of the plain twins to the bit. Values are
rounded to E4M3 numbers first, so that the conversion itself is exact, even in Triton's interpreter. Dequantising reads
codes and scales once and writes the result once.

Shapes: R rows, C columns, G group size; a tile holds TILE_GROUPS groups.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xorl.kernels.fused.device import launch
from xorl.kernels.optim.triton_updates import draw
from xorl.kernels.quant.formats import (
    BLOCK_FP8_NOISE_STEP,
    E2M1_LARGEST,
    E4M3_LARGEST,
    NF4_NOISE_STEP,
    NF4_TINY,
    NF4_VALUES,
    NVFP4_NOISE_STEP,
    nf4_bounds,
    table,
)
from xorl.kernels.quant.noise import COSINE, SINE, TURN, UNIFORM, WeightNoise

# Weights per tile: enough loads in flight to saturate memory bandwidth, few enough to fit into registers.
TILE = 4096
NUM_WARPS = 8
# Rows of a block_fp8 tile, which is as wide as a block. It must divide every supported block size.
TILE_ROWS = 16

_TINY = tl.constexpr(NF4_TINY)
_NF4_STEP = tl.constexpr(NF4_NOISE_STEP)
_FP4_LARGEST = tl.constexpr(E2M1_LARGEST)
_FP4_STEP = tl.constexpr(NVFP4_NOISE_STEP)
_E4M3_LARGEST = tl.constexpr(E4M3_LARGEST)
_FP8_STEP = tl.constexpr(BLOCK_FP8_NOISE_STEP)
_E4M3_SMALLEST_NORMAL = tl.constexpr(2.0**-6)
# Adding and subtracting this rounds to multiples of 2**-9, the spacing of E4M3's subnormal numbers.
_ROUND_SUBNORMAL = tl.constexpr(1.5 * 2.0**23 * 2.0**-9)
_UNIFORM = tl.constexpr(UNIFORM)
_TURN = tl.constexpr(TURN)
_SINE_3, _SINE_5, _SINE_7 = (tl.constexpr(factor) for factor in SINE)
_COSINE_4, _COSINE_6, _COSINE_8 = (tl.constexpr(factor) for factor in COSINE)


def quantize_nf4(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """See `nf4.quantize_nf4`."""
    num_rows, num_columns = weight.shape
    codes = torch.empty((num_rows, num_columns // 2), dtype=torch.uint8, device=weight.device)
    absmax = torch.empty((num_rows, num_columns // group_size), dtype=torch.float32, device=weight.device)
    bounds = table(nf4_bounds(), weight.device)
    grid, sizes = _tiles(absmax.numel(), group_size)
    launch(
        _quantize_nf4, grid, weight.contiguous(), codes, absmax, bounds, absmax.numel(), num_warps=NUM_WARPS, **sizes
    )
    return codes, absmax


def dequantize_nf4(codes: Tensor, absmax: Tensor, dtype: torch.dtype, noise: WeightNoise | None) -> Tensor:
    """See `nf4.dequantize_nf4`."""
    out = torch.empty((codes.shape[0], 2 * codes.shape[1]), dtype=dtype, device=codes.device)
    grid, sizes = _tiles(absmax.numel(), out.numel() // absmax.numel())
    values = table(NF4_VALUES, codes.device)
    tensors = (codes.contiguous(), absmax.contiguous(), values, out)
    launch(
        _dequantize_nf4, grid, *tensors, absmax.numel(), *_noise_arguments(noise, absmax), num_warps=NUM_WARPS, **sizes
    )
    return out


def quantize_nvfp4(weight: Tensor, global_scale: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """See `nvfp4.quantize_nvfp4`."""
    num_rows, num_columns = weight.shape
    codes = torch.empty((num_rows, num_columns // 2), dtype=torch.uint8, device=weight.device)
    groups_per_row = num_columns // group_size
    scales = torch.empty((num_rows, groups_per_row), dtype=torch.float8_e4m3fn, device=weight.device)
    grid, sizes = _tiles(scales.numel(), group_size)
    tensors = (weight.contiguous(), global_scale.contiguous(), codes, scales)
    launch(_quantize_nvfp4, grid, *tensors, scales.numel(), groups_per_row, num_warps=NUM_WARPS, **sizes)
    return codes, scales


def dequantize_nvfp4(
    codes: Tensor, scales: Tensor, global_scale: Tensor, dtype: torch.dtype, noise: WeightNoise | None
) -> Tensor:
    """See `nvfp4.dequantize_nvfp4`."""
    out = torch.empty((codes.shape[0], 2 * codes.shape[1]), dtype=dtype, device=codes.device)
    groups_per_row = scales.shape[1]
    grid, sizes = _tiles(scales.numel(), out.numel() // scales.numel())
    tensors = (codes.contiguous(), scales.contiguous(), global_scale.contiguous(), out)
    counts = (scales.numel(), groups_per_row)
    launch(
        _dequantize_nvfp4, grid, *tensors, *counts, *_noise_arguments(noise, global_scale), num_warps=NUM_WARPS, **sizes
    )
    return out


def quantize_block_fp8(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """See `block_fp8.quantize_block_fp8`."""
    num_rows, num_columns = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    blocks = (-(-num_rows // group_size), -(-num_columns // group_size))
    scales = torch.empty(blocks, dtype=torch.float32, device=weight.device)
    tensors = (weight.contiguous(), codes, scales)
    launch(_quantize_block_fp8, (scales.numel(),), *tensors, num_rows, num_columns, num_warps=NUM_WARPS, G=group_size)
    return codes, scales


def dequantize_block_fp8(
    codes: Tensor, scales: Tensor, group_size: int, dtype: torch.dtype, noise: WeightNoise | None
) -> Tensor:
    """See `block_fp8.dequantize_block_fp8`."""
    num_rows, num_columns = codes.shape
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    # A grid with one axis, in row-major order of the tiles: the other axes are limited to 65,535 programs.
    grid = (-(-num_rows // TILE_ROWS) * -(-num_columns // group_size),)
    tensors = (codes.contiguous(), scales.contiguous(), out)
    noise_arguments = _noise_arguments(noise, scales)
    sizes = {"G": group_size, "TILE_ROWS": TILE_ROWS}
    launch(_dequantize_block_fp8, grid, *tensors, num_rows, num_columns, *noise_arguments, num_warps=4, **sizes)
    return out


def _tiles(num_groups: int, group_size: int) -> tuple[tuple[int], dict[str, int]]:
    """The grid over tiles of complete groups, and the constants of a tile."""
    groups_per_tile = max(TILE // group_size, 1)
    return (-(-num_groups // groups_per_tile),), {"TILE_GROUPS": groups_per_tile, "HALF_GROUP": group_size // 2}


def _noise_arguments(noise: WeightNoise | None, placeholder: Tensor) -> tuple[Tensor, float, int]:
    """The kernel's arguments for the noise; `placeholder` replaces the tensor if there is no noise."""
    return (placeholder, 0.0, 0) if noise is None else (noise.state, noise.alpha, len(noise.state))


@triton.jit
def _divide(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """x / y in fp32, rounded to nearest; Triton's `/` is approximate."""
    return tl.div_rn(x, tl.full(x.shape, 0.0, tl.float32) + y)


@triton.jit
def _round_e4m3(x: tl.tensor) -> tl.tensor:
    """Round fp32 values within E4M3's range to the nearest E4M3 number, ties to even."""
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    subnormal = (magnitude + _ROUND_SUBNORMAL) - _ROUND_SUBNORMAL
    rounded = tl.where(magnitude < _E4M3_SMALLEST_NORMAL, subnormal, normal)
    rounded = tl.where(magnitude == magnitude, rounded, magnitude)
    # Copies the sign bit, because zeros are signed.
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _magnitude(x: tl.tensor) -> tl.tensor:
    """Absolute values. NaN becomes infinity, because a maximum would ignore NaN."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def _normals(pair: tl.tensor, state_ptr: tl.tensor, STATE_LENGTH: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The two numbers of `noise.normal_pairs` for each pair's int64 index."""
    offset = tl.load(state_ptr + 2)
    if STATE_LENGTH > 3:
        for field in tl.static_range(5, STATE_LENGTH, 2):  # pyright: ignore[reportGeneralTypeIssues]
            offset = tl.where(pair >= tl.load(state_ptr + field), tl.load(state_ptr + field + 1), offset)
        width = tl.load(state_ptr + 3)
        pair = pair // width * tl.load(state_ptr + 4) + pair % width
    pair += offset
    low, high = draw(pair, tl.load(state_ptr + 1), tl.load(state_ptr))  # pyright: ignore[reportGeneralTypeIssues]
    radius = tl.sqrt(-2.0 * tl.log((low.to(tl.float32) + 0.5) * _UNIFORM))
    quarter = (high + 0x20000000) >> 30
    x = (high - (quarter << 30)).to(tl.int32, bitcast=True).to(tl.float32) * _TURN
    square = x * x
    sine = x * (1.0 + square * (_SINE_3 + square * (_SINE_5 + square * _SINE_7)))
    cosine = 1.0 + square * (-0.5 + square * (_COSINE_4 + square * (_COSINE_6 + square * _COSINE_8)))
    is_odd_quarter = (quarter & 1) != 0
    one, other = tl.where(is_odd_quarter, sine, cosine), tl.where(is_odd_quarter, cosine, sine)
    one = tl.where(((quarter + 1) & 2) != 0, -one, one)
    other = tl.where((quarter & 2) != 0, -other, other)
    return radius * one, radius * other


@triton.jit
def _nf4_code(scaled: tl.tensor, bounds_ptr: tl.tensor) -> tl.tensor:
    code = tl.zeros(scaled.shape, tl.int32)
    for index in tl.static_range(15):  # pyright: ignore[reportGeneralTypeIssues]
        code += (scaled > tl.load(bounds_ptr + index)).to(tl.int32)
    return code


@triton.jit
def _quantize_nf4(
    weight_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    absmax_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    num_groups: int,
    TILE_GROUPS: tl.constexpr,
    HALF_GROUP: tl.constexpr,
) -> None:
    group = tl.program_id(0).to(tl.int64) * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    byte = group[:, None] * HALF_GROUP + tl.arange(0, HALF_GROUP)[None, :]
    inside = (group < num_groups)[:, None]
    even = tl.load(weight_ptr + 2 * byte, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(weight_ptr + 2 * byte + 1, mask=inside, other=0.0).to(tl.float32)
    absmax = tl.max(tl.maximum(_magnitude(even), _magnitude(odd)), axis=1)
    # The dtype is explicit, because Triton would make so small a constant fp64.
    divisor = tl.maximum(absmax, tl.full(absmax.shape, _TINY, tl.float32))
    reciprocal = _divide(tl.full(absmax.shape, 1.0, tl.float32), divisor)[:, None]
    upper = _nf4_code(tl.clamp(even * reciprocal, -1.0, 1.0), bounds_ptr)
    lower = _nf4_code(tl.clamp(odd * reciprocal, -1.0, 1.0), bounds_ptr)
    tl.store(codes_ptr + byte, (upper << 4 | lower).to(tl.uint8), mask=inside)
    tl.store(absmax_ptr + group, absmax, mask=group < num_groups)


@triton.jit
def _dequantize_nf4(
    codes_ptr: tl.tensor,
    absmax_ptr: tl.tensor,
    values_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_groups: int,
    state_ptr: tl.tensor,
    alpha: float,
    STATE_LENGTH: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    HALF_GROUP: tl.constexpr,
) -> None:
    group = tl.program_id(0).to(tl.int64) * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    byte = group[:, None] * HALF_GROUP + tl.arange(0, HALF_GROUP)[None, :]
    inside = (group < num_groups)[:, None]
    code = tl.load(codes_ptr + byte, mask=inside, other=0).to(tl.int32)
    absmax = tl.load(absmax_ptr + group, mask=group < num_groups, other=0.0)[:, None]
    first = tl.load(values_ptr + (code >> 4)) * absmax
    second = tl.load(values_ptr + (code & 0xF)) * absmax
    if STATE_LENGTH:
        one, other = _normals(byte, state_ptr, STATE_LENGTH)  # pyright: ignore[reportGeneralTypeIssues]
        noise_scale = alpha * _NF4_STEP * absmax
        first, second = first + noise_scale * one, second + noise_scale * other
    _store_pairs(out_ptr, group, first, second, num_groups, TILE_GROUPS, HALF_GROUP)


@triton.jit
def _store_pairs(
    out_ptr: tl.tensor,
    group: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    num_groups: int,
    TILE_GROUPS: tl.constexpr,
    HALF_GROUP: tl.constexpr,
) -> None:
    """Interleave the first and second elements of pairs, [TILE_GROUPS, G / 2] each, so that stores are wide."""
    dtype = out_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue] it is a pointer's
    both = tl.interleave(first.to(dtype), second.to(dtype))
    element = group[:, None] * (2 * HALF_GROUP) + tl.arange(0, 2 * HALF_GROUP)[None, :]
    tl.store(out_ptr + element, both, mask=(group < num_groups)[:, None])


@triton.jit
def _fp4_code(scaled: tl.tensor) -> tl.tensor:
    magnitude = tl.abs(scaled)
    code = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32) + (magnitude > 1.25).to(tl.int32)
    code += (magnitude >= 1.75).to(tl.int32) + (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
    code += (magnitude > 5.0).to(tl.int32)
    return code | (scaled < 0).to(tl.int32) << 3


@triton.jit
def _quantize_nvfp4(
    weight_ptr: tl.tensor,
    global_scale_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    num_groups: int,
    groups_per_row: int,
    TILE_GROUPS: tl.constexpr,
    HALF_GROUP: tl.constexpr,
) -> None:
    group = tl.program_id(0).to(tl.int64) * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    in_groups = group < num_groups
    byte = group[:, None] * HALF_GROUP + tl.arange(0, HALF_GROUP)[None, :]
    inside = in_groups[:, None]
    even = tl.load(weight_ptr + 2 * byte, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(weight_ptr + 2 * byte + 1, mask=inside, other=0.0).to(tl.float32)
    absmax = tl.max(tl.maximum(_magnitude(even), _magnitude(odd)), axis=1)
    global_scale = tl.load(global_scale_ptr + group // groups_per_row, mask=in_groups, other=1.0)
    scale = _divide(_divide(absmax, _FP4_LARGEST), global_scale)
    scale = tl.where(absmax < float("inf"), _round_e4m3(tl.minimum(scale, _E4M3_LARGEST)), float("nan"))
    step = scale * global_scale
    divisor = tl.where(step == 0, 1.0, step)[:, None]
    zero = (step == 0)[:, None]
    lower = _fp4_code(tl.where(zero, 0.0, _divide(even, divisor)))
    upper = _fp4_code(tl.where(zero, 0.0, _divide(odd, divisor)))
    tl.store(codes_ptr + byte, (upper << 4 | lower).to(tl.uint8), mask=inside)
    tl.store(scales_ptr + group, scale.to(scales_ptr.dtype.element_ty), mask=in_groups)


@triton.jit
def _fp4_value(code: tl.tensor) -> tl.tensor:
    """The E2M1 number divided by 2**14.

    Moves the bits of sign, exponent and mantissa to their places in fp16. Subnormal numbers are also correct, because
    fp16 has them too.
    """
    bits = ((code & 0x7) << 9 | (code & 0x8) << 12).to(tl.int16)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _dequantize_nvfp4(
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    global_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_groups: int,
    groups_per_row: int,
    state_ptr: tl.tensor,
    alpha: float,
    STATE_LENGTH: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    HALF_GROUP: tl.constexpr,
) -> None:
    group = tl.program_id(0).to(tl.int64) * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    in_groups = group < num_groups
    byte = group[:, None] * HALF_GROUP + tl.arange(0, HALF_GROUP)[None, :]
    code = tl.load(codes_ptr + byte, mask=in_groups[:, None], other=0).to(tl.int32)
    scale = tl.load(scales_ptr + group, mask=in_groups, other=0.0).to(tl.float32)
    global_scale = tl.load(global_scale_ptr + group // groups_per_row, mask=in_groups, other=0.0)
    step = (scale * global_scale)[:, None]
    first = _fp4_value(code) * (step * 16384.0)
    second = _fp4_value(code >> 4) * (step * 16384.0)
    if STATE_LENGTH:
        one, other = _normals(byte, state_ptr, STATE_LENGTH)  # pyright: ignore[reportGeneralTypeIssues]
        noise_scale = alpha * _FP4_STEP * step
        first, second = first + noise_scale * one, second + noise_scale * other
    _store_pairs(out_ptr, group, first, second, num_groups, TILE_GROUPS, HALF_GROUP)


@triton.jit
def _quantize_block_fp8(
    weight_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    num_rows: int,
    num_columns: int,
    G: tl.constexpr,
) -> None:
    num_blocks = tl.cdiv(num_columns, G)
    row = (tl.program_id(0) // num_blocks).to(tl.int64) * G + tl.arange(0, G)
    column = tl.program_id(0) % num_blocks * G + tl.arange(0, G)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    offset = row[:, None] * num_columns + column[None, :]
    x = tl.load(weight_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    scale = _divide(tl.max(tl.max(_magnitude(x), axis=1), axis=0), _E4M3_LARGEST)
    scale = tl.where(scale == 0, 1.0, scale)
    scaled = _divide(x, scale)
    code = _round_e4m3(tl.clamp(scaled, -_E4M3_LARGEST, _E4M3_LARGEST))
    tl.store(codes_ptr + offset, code.to(codes_ptr.dtype.element_ty), mask=inside)
    tl.store(scales_ptr + tl.program_id(0), scale)


@triton.jit
def _dequantize_block_fp8(
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: int,
    num_columns: int,
    state_ptr: tl.tensor,
    alpha: float,
    STATE_LENGTH: tl.constexpr,
    G: tl.constexpr,
    TILE_ROWS: tl.constexpr,
) -> None:
    num_blocks = tl.cdiv(num_columns, G)
    tile, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    row = tile.to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = block * G + tl.arange(0, G)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    offset = row[:, None] * num_columns + column[None, :]
    code = tl.load(codes_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scales_ptr + (tile * TILE_ROWS // G) * num_blocks + block)
    values = code * scale
    if STATE_LENGTH:
        one, other = _normals(offset >> 1, state_ptr, STATE_LENGTH)  # pyright: ignore[reportGeneralTypeIssues]
        values += alpha * _FP8_STEP * scale * tl.where(offset & 1 == 0, one, other)
    dtype = out_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue] it is a pointer's
    tl.store(out_ptr + offset, values.to(dtype), mask=inside)
