"""Matrix products of groups of adjacent rows, each group with its own matrix.

One call serves all groups: their ends are on the device, so the host does not wait, and compiled code does not depend
on them. On GPUs in bf16 these are torch's grouped matrix products; elsewhere a loop over the groups, the plain twin.

Shapes: M rows, S groups, N and K features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xorl.kernels.torch_private import grouped_mm

# torch's kernels require operand strides that are multiples of this.
ALIGNMENT_BYTES = 16
# Hopper.
MIN_CAPABILITY = 9


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x[m] @ weight[s] for the rows of group s: [M, K] and [S, K, N] to [M, N] in the dtype of x.

    ends: [S] int32, the ends of the groups, in order; groups may be empty. Rows from the last end on belong to no
    group, and their output is undefined.
    """
    x = x.contiguous()
    if _has_kernel(x, x.shape[1], weight.shape[2]):
        return grouped_mm(x, weight, offs=ends)
    out = x.new_empty(x.shape[0], weight.shape[2])
    for group, rows in enumerate(_slices(ends)):
        torch.mm(x[rows], weight[group], out=out[rows])
    return out


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """left.T @ right over the rows of each group: [M, N] and [M, K] to [S, N, K]; 0 for an empty group.

    Rows from the last end on are not read.
    """
    right = right.contiguous()
    if _has_kernel(right, right.shape[1], left.shape[1]):
        outer = grouped_mm(left.contiguous().t(), right, offs=ends)
        # The kernel leaves arbitrary values where it sums over no row.
        from xorl.kernels.grouped_triton import clear_empty_groups_  # noqa: PLC0415 - needs Triton

        clear_empty_groups_(outer, ends)
        return outer
    outer = right.new_zeros(len(ends), left.shape[1], right.shape[1])
    for group, rows in enumerate(_slices(ends)):
        if rows.stop > rows.start:
            torch.mm(left[rows].t(), right[rows], out=outer[group])
    return outer


def _slices(ends: Tensor) -> list[slice]:
    stops = ends.tolist()
    return [slice(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]


def product_refusal(dtype: torch.dtype, *widths: int) -> str | None:
    """The reason why torch has no kernel for products of these widths on this GPU, or None if it has one."""
    if dtype != torch.bfloat16:
        return f"torch's grouped products compute in bf16, not in {str(dtype).removeprefix('torch.')}"
    if any(width * dtype.itemsize % ALIGNMENT_BYTES for width in widths):
        return f"torch's grouped products need widths that are multiples of {ALIGNMENT_BYTES // dtype.itemsize}"
    if torch.cuda.get_device_capability()[0] < MIN_CAPABILITY:
        return f"torch's grouped products need a GPU of compute capability {MIN_CAPABILITY}.0 or later"
    return None


def _has_kernel(x: Tensor, *widths: int) -> bool:
    """Whether torch has a kernel for these groups that does not need their ends on the host."""
    return x.device.type == "cuda" and product_refusal(x.dtype, *widths) is None
