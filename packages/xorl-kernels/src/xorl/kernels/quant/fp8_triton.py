"""Triton kernels of the casts to fp8; `fp8` describes the computations and has the plain twins.

The kernels take contiguous matrices of fp32, fp16 or bf16, of any size. Maxima are computed by atomic operations, which
give the same result in any order.

Shapes: R rows, C columns, P padded rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xorl.kernels.fused.device import launch, power_of_2
from xorl.kernels.quant.formats import SMALLEST_AMAX, TOP_EXPONENT, padded

# Long enough for full bandwidth, short enough that a partly filled last wave of programs costs little.
BLOCK = 8192
# Square, so that the rows of a tile are 128 contiguous bytes in both outputs.
TILE_R, TILE_C = 128, 128
# Of stacks: narrow, so that the columns of a tile are still in the L2 cache when they are read again.
STACK_TILE_C = 64
# Values of a row that are read at once.
ROW_BLOCK = 4096
NUM_WARPS = 8
ROW_NUM_WARPS = 4

TINY: tl.constexpr = tl.constexpr(SMALLEST_AMAX)


def amax(x: Tensor) -> Tensor:
    """See `fp8.amax`."""
    x = x.contiguous()
    out = torch.zeros((), dtype=torch.float32, device=x.device)
    launch(_amax_kernel, (_num_blocks(x.numel(), BLOCK),), x, out, x.numel(), BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out


def cast_into_(x: Tensor, amax: Tensor, q: Tensor, descale: Tensor) -> None:
    """See `fp8.cast_into_`."""
    _cast(x, amax, amax, q, None, descale, descale, axiswise=False)


def cast_tensorwise_both(x: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """See `fp8.cast_tensorwise_both`."""
    q, q_t = _empty_q(x, dtype), _empty_q_t(x, dtype)
    descale = torch.empty((), dtype=torch.float32, device=x.device)
    _cast(x, amax, amax, q, q_t, descale, descale, axiswise=False)
    return q, q_t, descale


def cast_rowwise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `fp8.cast_rowwise`."""
    x = x.contiguous()
    num_rows, num_columns = x.shape
    q, descale = _empty_q(x, dtype), torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        launch(
            _cast_rows_kernel,
            (num_rows,),
            x,
            q,
            descale,
            NUM_COLUMNS=num_columns,
            TOP_EXP=TOP_EXPONENT[dtype],
            BLOCK=min(power_of_2(num_columns), ROW_BLOCK),
            num_warps=ROW_NUM_WARPS,
        )
    return q, descale


def cast_stack_columnwise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `fp8.cast_stack_columnwise`."""
    x = x.contiguous()
    num_matrices, num_rows, num_columns = x.shape
    q_t = torch.empty((num_matrices, num_columns, num_rows), dtype=dtype, device=x.device)
    descale = torch.empty((num_matrices, num_columns), dtype=torch.float32, device=x.device)
    num_blocks = _num_blocks(num_columns, STACK_TILE_C)
    if x.numel():
        launch(
            _cast_columns_kernel,
            (num_matrices * num_blocks,),
            x,
            q_t,
            descale,
            NUM_BLOCKS=num_blocks,
            NUM_ROWS=num_rows,
            NUM_COLUMNS=num_columns,
            TOP_EXP=TOP_EXPONENT[dtype],
            TILE_R=TILE_R,
            TILE_C=STACK_TILE_C,
            num_warps=NUM_WARPS,
        )
    return q_t, descale


def cast_columnwise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `fp8.cast_columnwise`."""
    _, largest = _axis_amax(x, by_row=False)
    q_t, descale = _empty_q_t(x, dtype), torch.empty_like(largest)
    _cast(x, largest, largest, None, q_t, descale, descale, axiswise=True)
    return q_t, descale


def cast_axiswise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `fp8.cast_axiswise`."""
    row_largest, column_largest = _axis_amax(x, by_row=True)
    q, q_t = _empty_q(x, dtype), _empty_q_t(x, dtype)
    row_descale, column_descale = torch.empty_like(row_largest), torch.empty_like(column_largest)
    _cast(x, row_largest, column_largest, q, q_t, row_descale, column_descale, axiswise=True)
    return q, row_descale, q_t, column_descale


def transpose(q: Tensor) -> Tensor:
    """See `fp8.transpose`."""
    num_rows, num_columns = q.shape
    out = _empty_q_t(q, q.dtype)
    grid = (_num_blocks(out.shape[1], TILE_R), _num_blocks(num_columns, TILE_C))
    launch(
        _transpose_kernel,
        grid,
        q.contiguous().view(torch.uint8),
        out.view(torch.uint8),
        num_rows,
        num_columns,
        out.shape[1],
        TILE_R=TILE_R,
        TILE_C=TILE_C,
        num_warps=NUM_WARPS,
    )
    return out


def _num_blocks(length: int, block: int) -> int:
    """The number of blocks that cover `length`."""
    return (length + block - 1) // block


def _empty_q(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _empty_q_t(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty((x.shape[1], padded(x.shape[0])), dtype=dtype, device=x.device)


def _axis_amax(x: Tensor, *, by_row: bool) -> tuple[Tensor, Tensor]:
    """The largest absolute values of x by row [R] and by column [C]. Without `by_row`, the first are zeros."""
    x = x.contiguous()
    num_rows, num_columns = x.shape
    row_largest = torch.zeros(num_rows, dtype=torch.float32, device=x.device)
    column_largest = torch.zeros(num_columns, dtype=torch.float32, device=x.device)
    grid = (_num_blocks(num_rows, TILE_R), _num_blocks(num_columns, TILE_C))
    launch(
        _axis_amax_kernel,
        grid,
        x,
        row_largest,
        column_largest,
        num_rows,
        num_columns,
        BY_ROW=by_row,
        TILE_R=TILE_R,
        TILE_C=TILE_C,
        num_warps=NUM_WARPS,
    )
    return row_largest, column_largest


def _cast(
    x: Tensor,
    row_amax: Tensor,
    column_amax: Tensor,
    q: Tensor | None,
    q_t: Tensor | None,
    row_descale: Tensor,
    column_descale: Tensor,
    *,
    axiswise: bool,
) -> None:
    """Cast x to fp8, into q, transposed into q_t, or both."""
    x = x.contiguous()
    num_rows, num_columns = x.shape
    # The placeholder for a missing output, which the kernel does not write.
    any_output = q if q is not None else q_t
    assert any_output is not None
    padded_rows = num_rows if q_t is None else padded(num_rows)
    grid = (_num_blocks(padded_rows, TILE_R), _num_blocks(num_columns, TILE_C))
    launch(
        _cast_kernel,
        grid,
        x,
        row_amax,
        column_amax,
        any_output if q is None else q,
        any_output if q_t is None else q_t,
        row_descale,
        column_descale,
        num_rows,
        num_columns,
        padded_rows,
        TOP_EXP=TOP_EXPONENT[any_output.dtype],
        AXISWISE=axiswise,
        WRITES_Q=q is not None,
        WRITES_Q_T=q_t is not None,
        TILE_R=TILE_R,
        TILE_C=TILE_C,
        num_warps=NUM_WARPS,
    )


@triton.jit
def _exponent(amax: tl.tensor, TOP_EXP: tl.constexpr) -> tl.tensor:
    """The exponent of the scale in `fp8.power_of_two_scale`."""
    bits = tl.maximum(amax, TINY).to(tl.int32, bitcast=True)
    above = ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return TOP_EXP - ((bits >> 23) - 127) - above


@triton.jit
def _power_of_two(exponent: tl.tensor) -> tl.tensor:
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _descale(amax: tl.tensor, exponent: tl.tensor) -> tl.tensor:
    return tl.where(amax < float("inf"), _power_of_two(-exponent), float("nan"))


@triton.jit
def _magnitude(x: tl.tensor) -> tl.tensor:
    """Absolute values. NaN becomes infinity, because a maximum would ignore NaN."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def _amax_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    numel: tl.int64,  # pyright: ignore[reportInvalidTypeForm]  (Triton's way to pass a wide integer)
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < numel, other=0.0).to(tl.float32)
    tl.atomic_max(out_ptr, tl.max(_magnitude(x), axis=0), sem="relaxed")


@triton.jit
def _axis_amax_kernel(
    x_ptr: tl.tensor,
    row_ptr: tl.tensor,
    column_ptr: tl.tensor,
    num_rows: int,
    num_columns: int,
    BY_ROW: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    column = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * num_columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if BY_ROW:
        tl.atomic_max(row_ptr + row, tl.max(_magnitude(x), axis=1), mask=row < num_rows, sem="relaxed")
    tl.atomic_max(column_ptr + column, tl.max(_magnitude(x), axis=0), mask=column < num_columns, sem="relaxed")


@triton.jit
def _cast_kernel(
    x_ptr: tl.tensor,
    row_amax_ptr: tl.tensor,
    column_amax_ptr: tl.tensor,
    q_ptr: tl.tensor,
    q_t_ptr: tl.tensor,
    row_descale_ptr: tl.tensor,
    column_descale_ptr: tl.tensor,
    num_rows: int,
    num_columns: int,
    padded_rows: int,
    TOP_EXP: tl.constexpr,
    AXISWISE: tl.constexpr,
    WRITES_Q: tl.constexpr,
    WRITES_Q_T: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    column = tl.program_id(1).to(tl.int64) * TILE_C + tl.arange(0, TILE_C)
    in_rows, in_columns = row < num_rows, column < num_columns
    inside = in_rows[:, None] & in_columns[None, :]
    x = tl.load(x_ptr + row[:, None] * num_columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if WRITES_Q:
        if AXISWISE:
            amax = tl.load(row_amax_ptr + row, mask=in_rows, other=0.0)
            exponent = _exponent(amax, TOP_EXP)
            if tl.program_id(1) == 0:
                tl.store(row_descale_ptr + row, _descale(amax, exponent), mask=in_rows)
            q = (x * _power_of_two(exponent)[:, None]).to(q_ptr.dtype.element_ty)
        else:
            amax = tl.load(row_amax_ptr)
            exponent = _exponent(amax, TOP_EXP)
            if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
                tl.store(row_descale_ptr, _descale(amax, exponent))
            q = (x * _power_of_two(exponent)).to(q_ptr.dtype.element_ty)
        tl.store(q_ptr + row[:, None] * num_columns + column[None, :], q, mask=inside)
    if WRITES_Q_T:
        if AXISWISE:
            amax = tl.load(column_amax_ptr + column, mask=in_columns, other=0.0)
            exponent = _exponent(amax, TOP_EXP)
            if tl.program_id(0) == 0:
                tl.store(column_descale_ptr + column, _descale(amax, exponent), mask=in_columns)
            q = (x * _power_of_two(exponent)[None, :]).to(q_t_ptr.dtype.element_ty)
        else:
            q = (x * _power_of_two(_exponent(tl.load(column_amax_ptr), TOP_EXP))).to(q_t_ptr.dtype.element_ty)
        # Rows beyond the last were loaded as zeros, which become the padding.
        inside_t = in_columns[:, None] & (row < padded_rows)[None, :]
        tl.store(q_t_ptr + column[:, None] * padded_rows + row[None, :], tl.trans(q), mask=inside_t)


@triton.jit
def _cast_rows_kernel(
    x_ptr: tl.tensor,
    q_ptr: tl.tensor,
    descale_ptr: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    TOP_EXP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * NUM_COLUMNS
    q_ptr += row * NUM_COLUMNS
    column = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, NUM_COLUMNS, BLOCK):
        x = tl.load(x_ptr + start + column, mask=start + column < NUM_COLUMNS, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, _magnitude(x))
    amax = tl.max(largest, axis=0)
    exponent = _exponent(amax, TOP_EXP)
    tl.store(descale_ptr + row, _descale(amax, exponent))
    scale = _power_of_two(exponent)
    for start in range(0, NUM_COLUMNS, BLOCK):
        inside = start + column < NUM_COLUMNS
        x = tl.load(x_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(q_ptr + start + column, (x * scale).to(q_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _cast_columns_kernel(
    x_ptr: tl.tensor,
    q_t_ptr: tl.tensor,
    descale_ptr: tl.tensor,
    NUM_BLOCKS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    TOP_EXP: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
) -> None:
    matrix = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    column = tl.program_id(0) % NUM_BLOCKS * TILE_C + tl.arange(0, TILE_C)
    in_columns = column < NUM_COLUMNS
    x_ptr += matrix * (NUM_ROWS * NUM_COLUMNS)
    q_t_ptr += matrix * (NUM_ROWS * NUM_COLUMNS)
    largest = tl.zeros([TILE_C], tl.float32)
    for start in range(0, NUM_ROWS, TILE_R):
        row = start + tl.arange(0, TILE_R)
        inside = (row < NUM_ROWS)[:, None] & in_columns[None, :]
        x = tl.load(x_ptr + row[:, None] * NUM_COLUMNS + column[None, :], mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(_magnitude(x), axis=0))
    exponent = _exponent(largest, TOP_EXP)
    tl.store(descale_ptr + matrix * NUM_COLUMNS + column, _descale(largest, exponent), mask=in_columns)
    scale = _power_of_two(exponent)
    for start in range(0, NUM_ROWS, TILE_R):
        row = start + tl.arange(0, TILE_R)
        inside = (row < NUM_ROWS)[:, None] & in_columns[None, :]
        x = tl.load(x_ptr + row[:, None] * NUM_COLUMNS + column[None, :], mask=inside, other=0.0).to(tl.float32)
        q_t = tl.trans((x * scale[None, :]).to(q_t_ptr.dtype.element_ty))
        inside_t = in_columns[:, None] & (row < NUM_ROWS)[None, :]
        tl.store(q_t_ptr + column[:, None] * NUM_ROWS + row[None, :], q_t, mask=inside_t)


@triton.jit
def _transpose_kernel(
    q_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: int,
    num_columns: int,
    padded_rows: int,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    column = tl.program_id(1).to(tl.int64) * TILE_C + tl.arange(0, TILE_C)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    q = tl.load(q_ptr + row[:, None] * num_columns + column[None, :], mask=inside, other=0)
    inside_t = (column < num_columns)[:, None] & (row < padded_rows)[None, :]
    tl.store(out_ptr + column[:, None] * padded_rows + row[None, :], tl.trans(q), mask=inside_t)
