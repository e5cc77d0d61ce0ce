"""A Triton kernel for products of matrices with their own transposes; it computes one triangle and writes both.

Imported only if Triton is installed. `symmetric.py` has the contract and the plain twin.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from xorl.kernels.fused.device import launch

# Height and width of a tile of the result, and the length of the summed axis that is read at once. The width must be a
# multiple of the height.
BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_SUMMED = 128, 256, 64
NUM_WARPS = 8


def symmetric_product(
    x: Tensor,
    added: Tensor | None,
    *,
    alpha: float,
    beta: float,
    block: tuple[int, int, int] = (BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_SUMMED),
) -> Tensor:
    """See `symmetric.symmetric_product`. The rows or columns of x must begin at multiples of 16 bytes."""
    num_matrices, rows, summed = x.shape
    block_rows, block_columns, block_summed = block
    in_rows = x.stride(-1) == 1
    # Values beyond a matrix's end are read as zeros, which do not change a product.
    panels = [
        TensorDescriptor.from_tensor(x, [1, width, block_summed])
        if in_rows
        else TensorDescriptor.from_tensor(x.mT, [1, block_summed, width])
        for width in (block_rows, block_columns)
    ]
    out = torch.empty(num_matrices, rows, rows, dtype=x.dtype, device=x.device)
    num_columns = -(-rows // block_columns)
    num_tiles = block_columns // block_rows * num_columns * (num_columns + 1) // 2
    launch(
        _symmetric_product,
        (num_matrices * num_tiles,),
        *panels,
        added,
        out,
        num_tiles,
        rows,
        alpha,
        beta,
        SUMMED=summed,
        IN_ROWS=in_rows,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        BLOCK_SUMMED=block_summed,
        num_warps=NUM_WARPS,
    )
    return out


@triton.jit
def _symmetric_product(
    panels: tl.tensor_descriptor,
    wide_panels: tl.tensor_descriptor,
    added: tl.tensor | None,
    out: tl.tensor,
    num_tiles: int,
    num_rows: int,
    alpha: float,
    beta: float,
    SUMMED: tl.constexpr,
    IN_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_SUMMED: tl.constexpr,
) -> None:
    """Each program computes one tile that overlaps the lower triangle of one matrix."""
    matrix = tl.program_id(0) // num_tiles
    row, column = _corner(tl.program_id(0) % num_tiles, BLOCK_ROWS, BLOCK_COLUMNS)  # pyright: ignore[reportGeneralTypeIssues]
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for start in range(0, SUMMED, BLOCK_SUMMED):
        if IN_ROWS:
            left = panels.load([matrix, row, start]).reshape(BLOCK_ROWS, BLOCK_SUMMED)
            right = wide_panels.load([matrix, column, start]).reshape(BLOCK_COLUMNS, BLOCK_SUMMED).T
        else:
            left = panels.load([matrix, start, row]).reshape(BLOCK_SUMMED, BLOCK_ROWS).T
            right = wide_panels.load([matrix, start, column]).reshape(BLOCK_SUMMED, BLOCK_COLUMNS)
        total = tl.dot(left, right, total)
    rows = (row + tl.arange(0, BLOCK_ROWS))[:, None]
    columns = (column + tl.arange(0, BLOCK_COLUMNS))[None, :]
    inside = (rows < num_rows) & (columns < num_rows)
    first = matrix.to(tl.int64) * num_rows * num_rows
    out += first
    if added is not None:
        added += first
    total *= alpha
    if row >= column + BLOCK_COLUMNS:
        _write(total, added, out, rows, columns, num_rows, beta, inside, inside)
    else:
        # The tile crosses the diagonal. Masks give every element one writer, so the result is deterministic.
        lower, strictly_lower = inside & (rows >= columns), inside & (rows > columns)
        _write(total, added, out, rows, columns, num_rows, beta, lower, strictly_lower)


@triton.jit
def _corner(tile: tl.tensor, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
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
    added: tl.tensor | None,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    num_rows: tl.tensor,
    beta: tl.tensor,
    mask: tl.tensor,
    mirrored_mask: tl.tensor,
) -> None:
    """Write values of the lower triangle, plus beta * added, and mirror them at the diagonal."""
    offsets = rows * num_rows + columns
    if added is not None:
        values += beta * tl.load(added + offsets, mask=mask, other=0.0).to(tl.float32)
    values = values.to(out.dtype.element_ty)  # pyright: ignore[reportAttributeAccessIssue]
    tl.store(out + offsets, values, mask=mask)
    tl.store(out + columns * num_rows + rows, values, mask=mirrored_mask)
