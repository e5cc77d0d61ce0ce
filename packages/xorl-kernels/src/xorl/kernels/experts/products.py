"""The grouped products that a layer of experts is made of. Each implementation is a module with these functions.

Shapes: M rows, sorted by expert, E experts, N and K features, T tokens, D model width, F width of an expert.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from xorl.kernels.experts import rows as plain
from xorl.kernels.experts.gates import Gate
from xorl.kernels.fused import triton_refusal


class Rows(NamedTuple):
    """values[indices] [M, K], or the values themselves if there are no indices [M]."""

    values: Tensor
    indices: Tensor | None = None


class Products(Protocol):
    """`ends` [E] int32 are the ends of the experts' rows; rows from the last end on are padding.

    Padding is never read, and its output is undefined.
    """

    def gather(self, x: Tensor, indices: Tensor) -> Rows:
        """The rows x[indices], gathered now or by the products."""
        ...

    def product(self, rows: Rows, weight: Tensor, ends: Tensor) -> Tensor:
        """rows[m] @ weight[e] for the rows of expert e: [M, K] and [E, K, N] to [M, N]."""
        ...

    def gated(
        self, rows: Rows, weight: Tensor, ends: Tensor, gate: Gate, biases: Tensor | None, *, keep_up: bool
    ) -> tuple[Tensor, Tensor]:
        """The product with [E, D, 2F], the gate first, and its activation with the biases [E, 2F]: [M, 2F] and [M, F].

        The first, which is without biases, is empty unless `keep_up`.
        """
        ...

    def outer(self, left: Rows, right: Rows, ends: Tensor) -> Tensor:
        """left.T @ right over the rows of each expert: [M, N] and [M, K] to [E, N, K]; 0 for an expert without rows."""
        ...


class AddingProducts(Products, Protocol):
    """Products that can be added to others, and that take little time where there is little to compute."""

    def add_product(self, out: Tensor, rows: Rows, weight: Tensor, ends: Tensor) -> None:
        """Add `product` to `out` [M, N], whose padding stays undefined."""
        ...

    def add_outer(self, out: Tensor, left: Rows, right: Rows, ends: Tensor) -> None:
        """Add `outer` to `out` [E, N, K], contiguous. Experts without rows take no time."""
        ...


def products_of(name: str) -> Products:
    """The module of the implementation `name`."""
    return cast("Products", import_module(f"xorl.kernels.experts.products_{name}"))


def adding_products(x: Tensor) -> AddingProducts:
    """The fastest module for rows with few features, and for few rows among much padding."""
    name = "native" if _is_plain(x) else "triton"
    return cast("AddingProducts", import_module(f"xorl.kernels.experts.products_{name}"))


def between_products(x: Tensor) -> ModuleType:
    """The module that computes everything between the products: `rows_triton` where Triton runs, else `rows`."""
    if _is_plain(x):
        return plain
    from xorl.kernels.experts import rows_triton  # noqa: PLC0415 - needs Triton

    return rows_triton


def _is_plain(x: Tensor) -> bool:
    return x.dtype == torch.float64 or triton_refusal(x.device.type) is not None
