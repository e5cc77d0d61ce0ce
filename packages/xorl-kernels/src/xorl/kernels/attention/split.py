"""Splits backward passes that are too large for kernels with 32-bit offsets into passes over subsets of the heads.

Shapes: T tokens, H query heads, G key/value heads, C channels of a head.
"""

from functools import wraps

import torch
from torch import Tensor

from xorl.kernels.attention.kernel import AttentionSpec, BackwardKernel, Documents, Gradients

# FlashAttention 2 and cuDNN compute correct gradients up to this many elements of q, or of k with a head for each of q
# (measured on an H100 with torch 2.11). With 3 % more, the gradients of the last document are wrong or NaN.
MAX_ELEMENTS = 2**31


def split_by_heads(backward: BackwardKernel) -> BackwardKernel:
    """Wrap a kernel to process a few heads at a time if q has more than MAX_ELEMENTS elements."""

    @wraps(backward)
    def split(
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        documents: Documents,
        key_documents: Documents,
        spec: AttentionSpec,
        *,
        deterministic: bool,
    ) -> Gradients:
        max_heads = max(MAX_ELEMENTS // (max(len(q), len(k)) * q.shape[2]), 1)
        if max_heads >= q.shape[1]:
            return backward(grad_out, q, k, v, out, lse, documents, key_documents, spec, deterministic=deterministic)
        group_size = q.shape[1] // k.shape[1]
        # A call gets whole groups if one fits. Otherwise it gets part of a group, and the calls' gradients of keys and
        # values are summed in fp32.
        heads_per_call = max_heads // group_size * group_size or max_heads
        grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        grad_k, grad_v = (
            torch.zeros(x.shape, dtype=torch.float32 if heads_per_call < group_size else x.dtype, device=x.device)
            for x in (k, v)
        )
        for first_group in range(0, k.shape[1], max(heads_per_call // group_size, 1)):
            groups = slice(first_group, min(first_group + max(heads_per_call // group_size, 1), k.shape[1]))
            keys, values = k[:, groups].contiguous(), v[:, groups].contiguous()
            for first in range(groups.start * group_size, groups.stop * group_size, heads_per_call):
                heads = slice(first, min(first + heads_per_call, groups.stop * group_size))
                grad_q[:, heads], part_k, part_v = backward(
                    grad_out[:, heads].contiguous(),
                    q[:, heads].contiguous(),
                    keys,
                    values,
                    out[:, heads].contiguous(),
                    lse[heads],
                    documents,
                    key_documents,
                    spec,
                    deterministic=deterministic,
                )
                grad_k[:, groups] += part_k
                grad_v[:, groups] += part_v
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)

    return split
