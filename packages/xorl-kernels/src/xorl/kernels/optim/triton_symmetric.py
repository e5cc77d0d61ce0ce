"""A Triton kernel for products of matrices with their own transposes; it computes one triangle and writes both.

Imported only if Triton is installed. `symmetric.py` has the contract and the plain twin.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from xorl.kernels.fused.device import launch

# Height and width of a tile of the result, and how much of the inner (summed) axis is read at once. The width must be a
# multiple of the height.
BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_INNER = 128, 256, 64
NUM_WARPS = 8


def symmetric_product(
    x: Tensor,
    addend: Tensor | None,
    *,
    alpha: float,
    beta: float,
    block: tuple[int, int, int] = (BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_INNER),
) -> Tensor:
    """See `symmetric.symmetric_product`. The rows or columns of x must begin at multiples of 16 bytes."""
    num_matrices, rows, inner = x.shape
    block_rows, block_columns, block_inner = block
    row_major = x.stride(-1) == 1
    # Reads beyond the end of a matrix return zeros, which do not change the product.
    panels = [
        TensorDescriptor.from_tensor(x, [1, width, block_inner])
        if row_major
        else TensorDescriptor.from_tensor(x.mT, [1, block_inner, width])
        for width in (block_rows, block_columns)
    ]
    out = torch.empty(num_matrices, rows, rows, dtype=x.dtype, device=x.device)
    num_columns = -(-rows // block_columns)
    num_tiles = block_columns // block_rows * num_columns * (num_columns + 1) // 2
    launch(
        _symmetric_product,
        (num_matrices * num_tiles,),
        *panels,
        addend,
        out,
        num_tiles,
        rows,
        alpha,
        beta,
        INNER=inner,
        ROW_MAJOR=row_major,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        BLOCK_INNER=block_inner,
        num_warps=NUM_WARPS,
    )
    return out


@triton.jit
def _symmetric_product(
    left_panels: tl.tensor_descriptor,
    right_panels: tl.tensor_descriptor,
    addend: tl.tensor | None,
    out: tl.tensor,
    num_tiles: int,
    num_rows: int,
    alpha: float,
    beta: float,
    INNER: tl.constexpr,
    ROW_MAJOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
) -> None:
    """Each program computes one tile that overlaps the lower triangle of one matrix."""
    matrix = tl.program_id(0) // num_tiles
    row, column = _tile_origin(tl.program_id(0) % num_tiles, BLOCK_ROWS, BLOCK_COLUMNS)  # pyright: ignore[reportGeneralTypeIssues]
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for start in range(0, INNER, BLOCK_INNER):
        if ROW_MAJOR:
            left = left_panels.load([matrix, row, start]).reshape(BLOCK_ROWS, BLOCK_INNER)
            right = right_panels.load([matrix, column, start]).reshape(BLOCK_COLUMNS, BLOCK_INNER).T
        else:
            left = left_panels.load([matrix, start, row]).reshape(BLOCK_INNER, BLOCK_ROWS).T
            right = right_panels.load([matrix, start, column]).reshape(BLOCK_INNER, BLOCK_COLUMNS)
        total = tl.dot(left, right, total)
    rows = (row + tl.arange(0, BLOCK_ROWS))[:, None]
    columns = (column + tl.arange(0, BLOCK_COLUMNS))[None, :]
    inside = (rows < num_rows) & (columns < num_rows)
    matrix_offset = matrix.to(tl.int64) * num_rows * num_rows
    out += matrix_offset
    if addend is not None:
        addend += matrix_offset
    total *= alpha
    if row >= column + BLOCK_COLUMNS:
        _write(total, addend, out, rows, columns, num_rows, beta, inside, inside)
    else:
        # The tile crosses the diagonal. The masks make sure that each element is written only once, so the result is
        # deterministic.
        lower, strictly_lower = inside & (rows >= columns), inside & (rows > columns)
        _write(total, addend, out, rows, columns, num_rows, beta, lower, strictly_lower)


@triton.jit
def _tile_origin(tile: tl.tensor, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The first row and column of a tile. Tiles are numbered by bands of BLOCK_COLUMNS rows, then by columns."""
    per_square: tl.constexpr = BLOCK_COLUMNS // BLOCK_ROWS
    square = tile // per_square
    # Band b starts at square b (b + 1) / 2. The root may be off by one because of rounding.
    band = ((tl.sqrt(8.0 * square.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    band = tl.where(band * (band + 1) // 2 > square, band - 1, band)
    band = tl.where((band + 1) * (band + 2) // 2 <= square, band + 1, band)
    row = band * BLOCK_COLUMNS + tile % per_square * BLOCK_ROWS
    return row, (square - band * (band + 1) // 2) * BLOCK_COLUMNS


@triton.jit
def _write(
    values: tl.tensor,
    addend: tl.tensor | None,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    num_rows: tl.tensor,
    beta: tl.tensor,
    mask: tl.tensor,
    mirrored_mask: tl.tensor,
) -> None:
    """Write values of the lower triangle, plus beta * addend, and their mirror images above the diagonal."""
    offsets = rows * num_rows + columns
    if addend is not None:
        values += beta * tl.load(addend + offsets, mask=mask, other=0.0).to(tl.float32)
    values = values.to(out.dtype.element_ty)  # pyright: ignore[reportAttributeAccessIssue]
    tl.store(out + offsets, values, mask=mask)
    tl.store(out + columns * num_rows + rows, values, mask=mirrored_mask)
