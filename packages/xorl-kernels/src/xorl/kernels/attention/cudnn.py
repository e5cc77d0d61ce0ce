"""cuDNN attention for N documents of equal length; the backends `native` and `sdpa` use it.

Shapes: N documents of L tokens, H query heads, G key/value heads, C channels of a head.
"""

from functools import lru_cache

import torch
from torch import Tensor

from xorl.kernels.attention.kernel import AttentionSpec, Gradients
from xorl.kernels.torch_private import (
    scaled_dot_product_cudnn_attention,
    scaled_dot_product_cudnn_attention_backward,
)

# cuDNN's backward pass supports wider heads only on Blackwell.
CUDNN_MAX_HEAD_DIM = 128


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Attention of q [N, H, L, C] over k and v [N, G, L, C], without a window.

    Returns the output, like q, and the log-sum-exp, fp32 [N, H, L].
    """
    out, lse, *_ = scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, spec.causal, scale=spec.scale)
    return out, lse.reshape(out.shape[:3])


def cudnn_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
) -> Gradients:
    """The gradients of q, k and v. They are not deterministic."""
    lse = lse.contiguous()
    statistics = lse.view(*lse.shape, *([1] * (_num_statistics_dims(q.device) - lse.dim())))
    length = q.shape[2]
    return scaled_dot_product_cudnn_attention_backward(
        grad_out,
        q,
        k,
        v,
        out,
        statistics,
        *no_dropout(q.device),
        None,
        None,
        None,
        length,
        length,
        0.0,
        spec.causal,
        scale=spec.scale,
    )


def no_dropout(device: torch.device) -> list[Tensor]:
    """Placeholders for the seed and offset that torch's operators require but, without dropout, do not read."""
    return [torch.zeros((), dtype=torch.int64, device=device) for _ in range(2)]


@lru_cache(maxsize=1)
def _num_statistics_dims(device: torch.device) -> int:
    """The number of dims of the log-sum-exp that torch's cuDNN operators exchange.

    It is not documented, so a small call finds it out.
    """
    x = torch.zeros((1, 1, 128, 64), dtype=torch.bfloat16, device=device)
    return scaled_dot_product_cudnn_attention(x, x, x, None, True, 0.0, True)[1].dim()
