"""Products of matrices with their own transposes; on Hopper only one triangle is computed."""

from functools import cache

import torch
from torch import Tensor

from xorl.kernels.fused.device import triton_refusal


def symmetric_product(x: Tensor, addend: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """alpha * x @ x.T + beta * addend for matrices x [B, M, K] and symmetric addend [B, M, M], in the dtype of x.

    Sums accumulate in fp32. On a Hopper GPU, in bf16 or fp16, only the lower triangle is computed and then mirrored,
    and only the lower triangle of `addend` is read. So the result is symmetric to the bit, and the product is about 1.6
    times as fast as torch's.
    """
    if _runs_on(x.device) and x.dtype in (torch.bfloat16, torch.float16) and _is_supported(x):
        # Triton comes with torch's GPU builds, and may be missing elsewhere.
        from xorl.kernels.optim import triton_symmetric  # noqa: PLC0415

        return triton_symmetric.symmetric_product(x, addend, alpha=alpha, beta=beta)
    return reference(x, addend, alpha=alpha, beta=beta)


def reference(x: Tensor, addend: Tensor | None, *, alpha: float, beta: float) -> Tensor:
    """The plain twin."""
    if addend is None:
        product = torch.bmm(x, x.mT)
        return product if alpha == 1 else alpha * product
    return torch.baddbmm(addend, x, x.mT, beta=beta, alpha=alpha)


@cache
def _runs_on(device: torch.device) -> bool:
    """Whether the kernel can run; its tiles are tuned for Hopper's memory and instructions."""
    return triton_refusal(device.type) is None and torch.cuda.get_device_capability(device) == (9, 0)


def _is_supported(x: Tensor) -> bool:
    """Whether the kernel can read x (its rows or columns must begin at multiples of 16 bytes) and index the result."""
    in_memory = x if x.stride(-1) == 1 else x.mT
    return (
        in_memory.is_contiguous()
        # The stride and not the length of a row, since they may differ if a row has only one element.
        and in_memory.stride(-2) * x.element_size() % 16 == 0
        and in_memory.data_ptr() % 16 == 0
        and x.shape[-2] ** 2 < 2**31
    )
