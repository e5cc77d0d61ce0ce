"""Orthogonalisation of matrices by Newton-Schulz iteration, many of one shape at a time."""

from __future__ import annotations

import torch
from torch import Tensor

# The quintic iteration of Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/), steep at zero: it takes
# singular values to about [0.7, 1.2], not to one.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


def orthogonalise(matrices: Tensor, num_steps: int) -> Tensor:
    """U V^T, about, of each U S V^T in `matrices` [B, M, N], in their dtype; sums are accumulated in fp32 on a GPU.

    A matrix of zeros stays one.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    # The iteration costs least on the side with fewer rows.
    x = matrices.mT if is_tall else matrices
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    # The spectral norm is at most this one, so it is at most one from here on.
    x = x / norm.clamp(min=EPS).to(x.dtype)
    for _ in range(num_steps):
        gram = torch.bmm(x, x.mT)  # [B, M, M], M the shorter side
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def orthogonalisation_flops(rows: int, columns: int, num_steps: int) -> int:
    """Floating-point operations of `orthogonalise` on one matrix."""
    short, long = sorted((rows, columns))
    return num_steps * (4 * short * short * long + 2 * short**3)
