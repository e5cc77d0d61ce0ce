"""The products of experts by torch's grouped matrix products, on rows gathered before; `products.Products`."""

from __future__ import annotations

from torch import Tensor

from xorl.kernels.experts.gates import Gate
from xorl.kernels.experts.products import Rows, between_products
from xorl.kernels.grouped import grouped_outer, grouped_product


def gather(x: Tensor, indices: Tensor) -> Rows:
    """As `Products.gather`."""
    return Rows(x[indices])


def product(rows: Rows, weight: Tensor, ends: Tensor) -> Tensor:
    """As `Products.product`."""
    assert rows.indices is None, "rows are gathered beforehand"
    return grouped_product(rows.values, weight, ends)


def add_product(out: Tensor, rows: Rows, weight: Tensor, ends: Tensor) -> None:
    """As `AddingProducts.add_product`."""
    out += product(rows, weight, ends)


def gated(
    rows: Rows, weight: Tensor, ends: Tensor, gate: Gate, biases: Tensor | None, *, keep_up: bool
) -> tuple[Tensor, Tensor]:
    """As `Products.gated`."""
    up = product(rows, weight, ends)
    return up if keep_up else up.new_empty(0), between_products(up).gated(up, ends, gate, biases)


def outer(left: Rows, right: Rows, ends: Tensor) -> Tensor:
    """As `Products.outer`."""
    assert left.indices is None, "rows are gathered beforehand"
    assert right.indices is None, "rows are gathered beforehand"
    return grouped_outer(left.values, right.values, ends)


def add_outer(out: Tensor, left: Rows, right: Rows, ends: Tensor) -> None:
    """As `AddingProducts.add_outer`."""
    out += outer(left, right, ends)
