"""The products of experts in Triton: they gather their rows, and the first one also computes the gated activation.

Plain twin: `products_native`. Sums are in fp32, in a fixed order, and every result is rounded once. Operands in fp8
have scales (`Scales`); their plain twin is in `products_fp8`.

Shapes: M rows, sorted by expert, E experts, N and K features, F width of an expert.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from xorl.kernels.experts.gates import SILU, Gate
from xorl.kernels.experts.products import Rows, between_products
from xorl.kernels.experts.rows_triton import activated, biases_or, gate_constants
from xorl.kernels.fused.device import launch, power_of_2

# Tiles of the output and the bytes along which they are summed at once, chosen by measurement on Hopper.
BLOCK_ROWS, BLOCK_COLUMNS, NUM_WARPS = 128, 256, 8
OUTER_BLOCK, OUTER_NUM_WARPS = 128, 4
DEPTH_BYTES = 128
NUM_STAGES = 4


class Scales(NamedTuple):
    """What values in fp8 were divided by, in fp32, and how their products are summed.

    of_rows: [R], for each row of `Rows.values`.
    of_columns: [E, N], for each column of the weight [E, K, N].
    fast: Hopper's matrix units keep about 14 bits of the running sum instead of adding it to fp32 after each block of
        products.
    """

    of_rows: Tensor
    of_columns: Tensor
    fast: bool


def gather(x: Tensor, indices: Tensor) -> Rows:
    """As `Products.gather`; the products gather."""
    return Rows(x.contiguous(), indices)


def product(
    rows: Rows, weight: Tensor, ends: Tensor, *, scales: Scales | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """As `Products.product`. With operands in fp8, the result is in `dtype`."""
    out = rows.values.new_empty(_num_rows(rows), weight.shape[2], dtype=dtype)
    _launch_product(rows, weight, ends, out, None, scales=scales)
    return out


def add_product(out: Tensor, rows: Rows, weight: Tensor, ends: Tensor) -> None:
    """As `AddingProducts.add_product`."""
    _launch_product(rows, weight, ends, out, None, adds=True)


def gated(
    rows: Rows,
    weight: Tensor,
    ends: Tensor,
    gate: Gate,
    biases: Tensor | None,
    *,
    keep_up: bool,
    scales: Scales | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """As `Products.gated`. With operands in fp8, the results are in `dtype`, which the biases have."""
    if gate.squares:
        up = product(rows, weight, ends, scales=scales, dtype=dtype)
        return up if keep_up else up.new_empty(0), between_products(up).gated(up, ends, gate, biases)
    num_rows, width = _num_rows(rows), weight.shape[2] // 2
    out = rows.values.new_empty(num_rows, width, dtype=dtype)
    up = out.new_empty(num_rows, 2 * width) if keep_up else out.new_empty(0)
    _launch_product(rows, weight, ends, out, up, gate, biases, scales=scales)
    return up, out


def outer(left: Rows, right: Rows, ends: Tensor) -> Tensor:
    """As `Products.outer`."""
    out = left.values.new_empty(len(ends), left.values.shape[1], right.values.shape[1])
    _launch_outer(out, left, right, ends)
    return out


def add_outer(out: Tensor, left: Rows, right: Rows, ends: Tensor) -> None:
    """As `AddingProducts.add_outer`."""
    assert out.is_contiguous(), "the kernel adds to it in place"
    _launch_outer(out, left, right, ends, adds=True)


def _launch_outer(out: Tensor, left: Rows, right: Rows, ends: Tensor, *, adds: bool = False) -> None:
    left_values, right_values = left.values.contiguous(), right.values.contiguous()
    num_left, num_right = left_values.shape[1], right_values.shape[1]
    if out.numel():
        blocks_left, blocks_right = math.ceil(num_left / OUTER_BLOCK), math.ceil(num_right / OUTER_BLOCK)
        launch(
            _outer,
            (len(ends) * blocks_left * blocks_right,),
            left_values,
            _indices_of(left),
            right_values,
            _indices_of(right),
            ends,
            out,
            NUM_LEFT=num_left,
            NUM_RIGHT=num_right,
            GATHERS_LEFT=left.indices is not None,
            GATHERS_RIGHT=right.indices is not None,
            ADDS=adds,
            PRECISION=_precision(left_values),
            BLOCKS_LEFT=blocks_left,
            BLOCKS_RIGHT=blocks_right,
            BLOCK=OUTER_BLOCK,
            BLOCK_ROWS=DEPTH_BYTES // left_values.element_size(),
            num_warps=OUTER_NUM_WARPS,
            num_stages=NUM_STAGES,
        )


def _launch_product(
    rows: Rows,
    weight: Tensor,
    ends: Tensor,
    out: Tensor,
    up: Tensor | None,
    gate: Gate = SILU,
    biases: Tensor | None = None,
    *,
    adds: bool = False,
    scales: Scales | None = None,
) -> None:
    """Write the product to `out` [M, N], or with `up` its gated activation [M, N / 2], in which biases are [E, N].

    up: gets the product unless it is empty. adds: add to `out`; without `up`.
    """
    values, num_rows = rows.values.contiguous(), _num_rows(rows)
    num_experts, depth, _ = weight.shape
    num_columns = out.shape[1]
    if out.numel():
        # Sums of blocks of fp8 take as many registers again.
        is_halved = up is not None or (scales is not None and not scales.fast)
        block_columns = min(BLOCK_COLUMNS // 2 if is_halved else BLOCK_COLUMNS, max(power_of_2(num_columns), 16))
        block_depth = DEPTH_BYTES // values.element_size()
        num_blocks = math.ceil(num_columns / block_columns)
        # Each expert may end with a block that is not full.
        max_tiles = num_rows // BLOCK_ROWS + num_experts
        launch(
            _product,
            (max_tiles * num_blocks,),
            values,
            _indices_of(rows),
            weight,
            ends,
            biases_or(biases, values),
            values if scales is None else scales.of_rows,
            values if scales is None else scales.of_columns,
            out if up is None else up,
            out,
            EXPERT_STRIDE=weight.stride(0),
            DEPTH_STRIDE=weight.stride(1),
            COLUMN_STRIDE=weight.stride(2),
            DEPTH=depth,
            NUM_COLUMNS=num_columns,
            GATHERS=rows.indices is not None,
            ADDS=adds,
            IS_GATED=up is not None,
            KEEPS_UP=up is not None and up.numel() > 0,
            IS_SCALED=scales is not None,
            MOST_IMPRECISE=block_depth if scales is not None and not scales.fast else None,
            PRECISION=_precision(values),
            NUM_BLOCKS=num_blocks,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_COLUMNS=block_columns,
            BLOCK_DEPTH=block_depth,
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
            **gate_constants(gate, biases, num_experts),
        )


def _num_rows(rows: Rows) -> int:
    return len(rows.values if rows.indices is None else rows.indices)


def _indices_of(rows: Rows) -> Tensor:
    return rows.values if rows.indices is None else rows.indices


def _precision(values: Tensor) -> str:
    """fp32 is multiplied as fp32, not as TF32."""
    return "ieee" if values.dtype == torch.float32 else "tf32"


@triton.jit
def _product(
    x_ptr: tl.tensor,
    indices_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    biases_ptr: tl.tensor,
    row_scales_ptr: tl.tensor,
    column_scales_ptr: tl.tensor,
    up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    EXPERT_STRIDE: tl.constexpr,
    DEPTH_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    GATHERS: tl.constexpr,
    ADDS: tl.constexpr,
    IS_GATED: tl.constexpr,
    KEEPS_UP: tl.constexpr,
    IS_SCALED: tl.constexpr,
    MOST_IMPRECISE: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    HAS_BIASES: tl.constexpr,
    ALPHA: tl.constexpr,
    CUBIC: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    # Blocks of columns of the same rows run together and share the rows in the L2 cache.
    # Indexed, because type checkers do not see that the result can be unpacked.
    tile = _find_tile(ends_ptr, tl.program_id(0) // NUM_BLOCKS, NUM_EXPERTS, BLOCK_EXPERTS, BLOCK_ROWS)
    expert, first_row, end = tile[0], tile[1], tile[2]
    if first_row >= end:
        return
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    is_row = rows < end
    # Reading the last row again is cheaper than a mask in the loop; nothing is stored for it.
    sources = tl.minimum(rows, end - 1)
    if GATHERS:
        sources = tl.load(indices_ptr + sources)
    columns = (tl.program_id(0) % NUM_BLOCKS) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_column = columns < NUM_COLUMNS
    depths = tl.arange(0, BLOCK_DEPTH)
    row_offsets = sources.to(tl.int64) * DEPTH
    weight_ptr += expert.to(tl.int64) * EXPERT_STRIDE
    up_weight_ptr = weight_ptr + NUM_COLUMNS * COLUMN_STRIDE
    product = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    up = product
    for start in range(0, DEPTH, BLOCK_DEPTH):
        at = start + depths
        is_depth = at < DEPTH
        x = tl.load(x_ptr + row_offsets[:, None] + at[None, :], mask=is_depth[None, :], other=0.0)
        offsets = at[:, None] * DEPTH_STRIDE + columns[None, :] * COLUMN_STRIDE
        mask = is_depth[:, None] & is_column[None, :]
        weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0)
        product = tl.dot(x, weight, product, input_precision=PRECISION, max_num_imprecise_acc=MOST_IMPRECISE)
        if IS_GATED:
            up_weight = tl.load(up_weight_ptr + offsets, mask=mask, other=0.0)
            up = tl.dot(x, up_weight, up, input_precision=PRECISION, max_num_imprecise_acc=MOST_IMPRECISE)
    if IS_SCALED:
        of_rows = tl.load(row_scales_ptr + sources)[:, None]
        scale_ptr = column_scales_ptr + expert.to(tl.int64) * (2 * NUM_COLUMNS if IS_GATED else NUM_COLUMNS)
        product *= of_rows * tl.load(scale_ptr + columns, mask=is_column, other=0.0)[None, :]
        if IS_GATED:
            up *= of_rows * tl.load(scale_ptr + NUM_COLUMNS + columns, mask=is_column, other=0.0)[None, :]
    dtype = out_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue] it is a pointer
    is_inside = is_row[:, None] & is_column[None, :]
    wide_rows = rows.to(tl.int64)[:, None]
    if IS_GATED:
        # Rounded first, as in the backward pass, which reads them from memory.
        gate, up = product.to(dtype), up.to(dtype)
        if KEEPS_UP:
            up_ptrs = up_ptr + wide_rows * (2 * NUM_COLUMNS) + columns[None, :]
            tl.store(up_ptrs, gate, mask=is_inside)
            tl.store(up_ptrs + NUM_COLUMNS, up, mask=is_inside)
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        if HAS_BIASES:
            bias_ptr = biases_ptr + expert.to(tl.int64) * 2 * NUM_COLUMNS
            gate += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias_ptr + NUM_COLUMNS + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        parts = activated(gate, up, ALPHA, CUBIC, HAS_LIMIT, LIMIT, OFFSET)
        product = parts[0] * parts[1] * parts[2]
    out_ptrs = out_ptr + wide_rows * NUM_COLUMNS + columns[None, :]
    if ADDS:
        product += tl.load(out_ptrs, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out_ptrs, product.to(dtype), mask=is_inside)


@triton.jit
def _outer(
    left_ptr: tl.tensor,
    left_indices_ptr: tl.tensor,
    right_ptr: tl.tensor,
    right_indices_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    out_ptr: tl.tensor,
    NUM_LEFT: tl.constexpr,
    NUM_RIGHT: tl.constexpr,
    GATHERS_LEFT: tl.constexpr,
    GATHERS_RIGHT: tl.constexpr,
    ADDS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCKS_LEFT: tl.constexpr,
    BLOCKS_RIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    expert = program // (BLOCKS_LEFT * BLOCKS_RIGHT)
    lefts = (program // BLOCKS_RIGHT % BLOCKS_LEFT) * BLOCK + tl.arange(0, BLOCK)
    rights = (program % BLOCKS_RIGHT) * BLOCK + tl.arange(0, BLOCK)
    first_row = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    if ADDS:  # noqa: SIM102 - known when the kernel is compiled
        if end == first_row:
            return
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(first_row, end, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        is_row = rows < end
        left_rows = tl.load(left_indices_ptr + rows, mask=is_row, other=0) if GATHERS_LEFT else rows
        right_rows = tl.load(right_indices_ptr + rows, mask=is_row, other=0) if GATHERS_RIGHT else rows
        left = tl.load(
            left_ptr + left_rows.to(tl.int64)[:, None] * NUM_LEFT + lefts[None, :],
            mask=is_row[:, None] & (lefts < NUM_LEFT)[None, :],
            other=0.0,
        )
        right = tl.load(
            right_ptr + right_rows.to(tl.int64)[:, None] * NUM_RIGHT + rights[None, :],
            mask=is_row[:, None] & (rights < NUM_RIGHT)[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
    dtype = out_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue] it is a pointer
    out_ptr += expert.to(tl.int64) * NUM_LEFT * NUM_RIGHT
    is_inside = (lefts < NUM_LEFT)[:, None] & (rights < NUM_RIGHT)[None, :]
    offsets = lefts[:, None] * NUM_RIGHT + rights[None, :]
    if ADDS:
        total += tl.load(out_ptr + offsets, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, total.to(dtype), mask=is_inside)


@triton.jit
def _find_tile(
    ends_ptr: tl.tensor,
    tile: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The tile's expert, its first row, and the end of the expert's rows; no rows (0, 0) beyond the last tile."""
    experts = tl.arange(0, BLOCK_EXPERTS)
    is_expert = experts < NUM_EXPERTS
    ends = tl.load(ends_ptr + experts, mask=is_expert, other=0)
    starts = tl.load(ends_ptr + experts - 1, mask=is_expert & (experts > 0), other=0)
    num_tiles = tl.where(is_expert, tl.cdiv(ends - starts, BLOCK_ROWS), 0)
    tiles_until = tl.cumsum(num_tiles, axis=0)
    expert = tl.sum((tiles_until <= tile).to(tl.int32), axis=0)
    is_found = experts == expert
    end = tl.sum(tl.where(is_found, ends, 0), axis=0)
    first_row = tl.sum(tl.where(is_found, starts + (tile - tiles_until + num_tiles) * BLOCK_ROWS, 0), axis=0)
    return expert, first_row, end
