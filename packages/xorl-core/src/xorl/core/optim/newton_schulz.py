"""Batched orthogonalisation of matrices by Newton-Schulz iteration."""

from __future__ import annotations

import torch
from torch import Tensor

from xorl.kernels.optim import symmetric_product

# The quintic iteration of Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/). It is steep at zero to
# converge fast, so singular values end up in about [0.7, 1.2] instead of at one.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


def orthogonalise(matrices: Tensor, num_steps: int) -> Tensor:
    """Approximately U V^T for each U S V^T in contiguous `matrices` [B, M, N], in their dtype.

    On GPUs, products accumulate in fp32. A zero matrix stays zero.
    """
    a, b, c = COEFFICIENTS
    x = matrices
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    # The Frobenius norm bounds the spectral norm, which is therefore at most one from here on.
    x = x / norm.clamp(min=EPS).to(x.dtype)
    is_tall = x.shape[-2] > x.shape[-1]
    for _ in range(num_steps):
        # [B, S, S] with S the shorter side, which is the cheaper one to iterate on.
        gram = symmetric_product(x.mT if is_tall else x)
        polynomial = symmetric_product(gram, gram, alpha=c, beta=b)
        x = torch.baddbmm(x, x, polynomial, beta=a) if is_tall else torch.baddbmm(x, polynomial, x, beta=a)
    return x


def orthogonalisation_flops(rows: int, columns: int, num_steps: int) -> int:
    """FLOPs of `orthogonalise` on one matrix; symmetric products count for one triangle only."""
    short, long = sorted((rows, columns))
    return num_steps * (3 * short * short * long + short**3)
