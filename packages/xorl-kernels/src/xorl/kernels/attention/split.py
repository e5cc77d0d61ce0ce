"""Splits backward passes that are too large for kernels with 32-bit offsets into passes over subsets of the heads.

Shapes: T tokens, H query heads, G key/value heads, C channels of a head.
"""

from functools import wraps

import torch
from torch import Tensor

from xorl.kernels.attention.operator import BackwardKernel, Gradients

# Up to this many elements of q, the gradients of FlashAttention 2 and cuDNN are correct, measured on an H100 with torch
# 2.11. With 3 % more, the gradients of the last document are wrong or NaN.
LARGEST = 2**31


def split_by_heads(backward: BackwardKernel) -> BackwardKernel:
    """Wrap a kernel to process a few heads at a time if q has more than LARGEST elements."""

    @wraps(backward)
    def split(
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        cu_seqlens: Tensor,
        offsets: Tensor,
        *,
        scale: float,
        window: int | None,
        deterministic: bool,
    ) -> Gradients:
        options = {"scale": scale, "window": window, "deterministic": deterministic}
        heads_at_once = max(LARGEST // (q.shape[0] * q.shape[2]), 1)
        if heads_at_once >= q.shape[1]:
            return backward(grad_out, q, k, v, out, lse, cu_seqlens, offsets, **options)
        group = q.shape[1] // k.shape[1]
        # Whole groups if they fit, else parts of a group; then the parts' gradients of keys are summed in fp32.
        step = heads_at_once // group * group or heads_at_once
        grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        grad_k, grad_v = (
            torch.zeros(x.shape, dtype=torch.float32 if step < group else x.dtype, device=x.device) for x in (k, v)
        )
        for first_group in range(0, k.shape[1], max(step // group, 1)):
            groups = slice(first_group, min(first_group + max(step // group, 1), k.shape[1]))
            keys, values = k[:, groups].contiguous(), v[:, groups].contiguous()
            for first in range(groups.start * group, groups.stop * group, step):
                heads = slice(first, min(first + step, groups.stop * group))
                grad_q[:, heads], part_k, part_v = backward(
                    grad_out[:, heads].contiguous(),
                    q[:, heads].contiguous(),
                    keys,
                    values,
                    out[:, heads].contiguous(),
                    lse[heads],
                    cu_seqlens,
                    offsets,
                    **options,
                )
                grad_k[:, groups] += part_k
                grad_v[:, groups] += part_v
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)

    return split
