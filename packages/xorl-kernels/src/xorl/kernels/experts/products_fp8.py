"""The products of experts in fp8, with a scale for each row and each column; `products.Products`.

What is multiplied with the weights is cast to E4M3 first: a row of activations or gradients with one scale, and the
weights with one for each column of the product; the scales are multiplied with the sums. Gradients of weights are
products in the dtype of the rows: their operands would have to be cast again, transposed and with scales along the rows
of each expert, which, by the bytes that it moves, takes most of the time that products in fp8 would save.

Weights are cast for each product, and a token's row once for all of its experts. In the forward pass, which multiplies
with the weights as they are stored, transposed, sums use fast accumulation; the others are in fp32.

Shapes: M rows, sorted by expert, E experts, N and K features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from xorl.kernels.experts.gates import Gate
from xorl.kernels.experts.products import Rows, adding_products, between_products
from xorl.kernels.fused import triton_refusal
from xorl.kernels.grouped import grouped_product
from xorl.kernels.quant.fp8 import E4M3, cast_rowwise, cast_stack_columnwise


def gather(x: Tensor, indices: Tensor) -> Rows:
    """As `Products.gather`."""
    return adding_products(x).gather(x, indices)


def product(rows: Rows, weight: Tensor, ends: Tensor) -> Tensor:
    """As `Products.product`."""
    operands = _cast(rows, weight)
    if _is_plain(rows.values):
        return _plain_product(operands, ends, rows.values.dtype)
    from xorl.kernels.experts import products_triton  # noqa: PLC0415 - needs Triton

    scales = products_triton.Scales(operands.of_rows, operands.of_columns, operands.fast)
    return products_triton.product(operands.rows, operands.weight, ends, scales=scales, dtype=rows.values.dtype)


def gated(
    rows: Rows, weight: Tensor, ends: Tensor, gate: Gate, biases: Tensor | None, *, keep_up: bool
) -> tuple[Tensor, Tensor]:
    """As `Products.gated`."""
    if _is_plain(rows.values):
        up = product(rows, weight, ends)
        return up if keep_up else up.new_empty(0), between_products(up).gated(up, ends, gate, biases)
    from xorl.kernels.experts import products_triton  # noqa: PLC0415 - needs Triton

    operands = _cast(rows, weight)
    scales = products_triton.Scales(operands.of_rows, operands.of_columns, operands.fast)
    return products_triton.gated(
        operands.rows,
        operands.weight,
        ends,
        gate,
        biases,
        keep_up=keep_up,
        scales=scales,
        dtype=rows.values.dtype,
    )


def outer(left: Rows, right: Rows, ends: Tensor) -> Tensor:
    """As `Products.outer`, not in fp8."""
    return adding_products(right.values).outer(left, right, ends)


class _Operands(NamedTuple):
    """The operands of a product in fp8; see `products_triton.Scales`."""

    rows: Rows
    weight: Tensor
    of_rows: Tensor
    of_columns: Tensor
    fast: bool


def _cast(rows: Rows, weight: Tensor) -> _Operands:
    values, of_rows = cast_rowwise(rows.values, E4M3)
    stored = weight.transpose(1, 2)  # [E, N, K]
    is_forward = stored.is_contiguous()
    if is_forward:
        codes, of_columns = cast_rowwise(stored.flatten(0, 1), E4M3)
        codes, of_columns = codes.view(stored.shape), of_columns.view(stored.shape[:2])
    else:
        codes, of_columns = cast_stack_columnwise(weight, E4M3)
    return _Operands(Rows(values, rows.indices), codes.transpose(1, 2), of_rows, of_columns, is_forward)


def _plain_product(operands: _Operands, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """The product in fp32, of rows that were gathered; rows from the last end on are undefined."""
    rows, weight, of_rows, of_columns, _ = operands
    assert rows.indices is None, "rows are gathered beforehand"
    product = grouped_product(rows.values.float(), weight.float(), ends)
    places = torch.arange(len(product), device=ends.device, dtype=ends.dtype)
    experts = torch.searchsorted(ends, places, right=True).clamp_(max=len(ends) - 1)
    return (product * of_rows[:, None] * of_columns[experts]).to(dtype)


def _is_plain(x: Tensor) -> bool:
    return triton_refusal(x.device.type) is not None
