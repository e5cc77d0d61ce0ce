"""The products of experts by the library quack-kernels, which gathers rows in its products; `products.Products`."""

from __future__ import annotations

import torch
from quack.gemm_interface import gemm  # pyright: ignore[reportMissingImports]
from torch import Tensor

from xorl.kernels.experts.gates import Gate
from xorl.kernels.experts.products import Rows, between_products


def gather(x: Tensor, indices: Tensor) -> Rows:
    """As `Products.gather`; the products gather."""
    return Rows(x.contiguous(), indices)


def product(rows: Rows, weight: Tensor, ends: Tensor) -> Tensor:
    """As `Products.product`."""
    num_rows = len(rows.values if rows.indices is None else rows.indices)
    out = rows.values.new_empty(num_rows, weight.shape[2])
    gemm(rows.values, weight, out, cu_seqlens_m=_bounds(ends), A_idx=rows.indices, tuned=False)
    return out


def gated(
    rows: Rows, weight: Tensor, ends: Tensor, gate: Gate, biases: Tensor | None, *, keep_up: bool
) -> tuple[Tensor, Tensor]:
    """As `Products.gated`."""
    up = product(rows, weight, ends)
    return up if keep_up else up.new_empty(0), between_products(up).gated(up, ends, gate, biases)


def outer(left: Rows, right: Rows, ends: Tensor) -> Tensor:
    """As `Products.outer`."""
    out = left.values.new_empty(len(ends), left.values.shape[1], right.values.shape[1])
    if right.indices is not None:
        # Only the first operand is gathered.
        left, right, target = right, left, out.transpose(1, 2)
    else:
        target = out
    gemm(left.values.t(), right.values, target, cu_seqlens_k=_bounds(ends), A_idx=left.indices, tuned=False)
    return out


def _bounds(ends: Tensor) -> Tensor:
    """[E + 1] int32, the ends after a 0."""
    return torch.nn.functional.pad(ends, (1, 0))
