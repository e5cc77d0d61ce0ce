"""Shared by scans with one decay per head and token: the decays of a chunk, and reads and writes of the state.

Shapes: L tokens of a chunk, H heads, K channels of keys, V channels of values.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Longer chunks need fewer steps in sequence, but the work per token inside a chunk grows with its length.
CHUNK_TOKENS = 64


class Decays(NamedTuple):
    """Products of exp(g) over some tokens of a chunk.

    Attributes:
        between: [H, L, L]; [:, i, j] is over the tokens after j up to i, or 0 where j > i.
        before: [H, L, 1]; [:, i] is over the tokens up to i, the factor on the state before the chunk.
        after: [H, L, 1]; [:, j] is over the tokens after j, the factor on the update of j at the end of the chunk.
        whole: [H, 1, 1], over all tokens.
    """

    between: Tensor
    before: Tensor
    after: Tensor
    whole: Tensor

    @classmethod
    def of(cls, g: Tensor) -> "Decays":
        """Computes the decays from their logarithms g [H, L].

        Each exponent is summed over its own tokens. A difference of two cumulative sums would lose digits where a slow
        decay follows a fast one.
        """
        length = g.shape[-1]
        later = g[..., None].expand(-1, -1, length).tril(-1)  # [H, L, L], g[i] where i > j
        # A matrix product, because torch has no deterministic cumulative sum for CUDA.
        sums = torch.ones_like(later).tril() @ later
        between = sums.exp().tril()
        before = (sums[..., :1] + g[:, :1, None]).exp()
        return cls(between, before, between[:, -1, :, None], before[:, -1:])

    def gradient(self, grads: "Decays") -> Tensor:
        """Returns the gradient of g [H, L], given those of the four factors."""
        grad_before = grads.before.clone()
        grad_before[:, -1:] += grads.whole
        grad_first = grad_before * self.before  # [H, L, 1], of the exponents of `before`
        grad_sums = grads.between.clone()
        grad_sums[:, -1] += grads.after.squeeze(-1)
        grad_sums *= self.between
        grad_sums[..., :1] += grad_first
        grad_g = (torch.ones_like(grad_sums).triu() @ grad_sums).tril(-1).sum(-1)
        grad_g[:, 0] += grad_first.sum((1, 2))
        return grad_g


def read_and_write(q: Tensor, k: Tensor, updates: Tensor, decays: Decays, state: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the output [H, L, V], and the state after the chunk.

    At each token the state decays, then the outer product of k and the update is added, then q reads it.

    Args:
        q, k: [H, L, K].
        updates: [H, L, V].
        state: [H, K, V], before the chunk.
    """
    out = decays.before * (q @ state) + ((q @ k.transpose(1, 2)) * decays.between) @ updates
    return out, decays.whole * state + (decays.after * k).transpose(1, 2) @ updates


class ReadWriteGradients(NamedTuple):
    """The gradients of the arguments of `read_and_write`, in the same shapes."""

    q: Tensor
    k: Tensor
    updates: Tensor
    decays: Decays
    state: Tensor


def read_and_write_gradients(
    grad_out: Tensor, grad_next: Tensor, q: Tensor, k: Tensor, updates: Tensor, decays: Decays, state: Tensor
) -> ReadWriteGradients:
    """Differentiates `read_and_write`, given the gradients of its two results."""
    scores = q @ k.transpose(1, 2)  # [H, L, L]
    grad_weights = grad_out @ updates.transpose(1, 2)
    grad_scores = grad_weights * decays.between
    grad_read = decays.before * grad_out  # of q @ state
    grad_kept = updates @ grad_next.transpose(1, 2)  # of decays.after * k
    return ReadWriteGradients(
        q=grad_read @ state.transpose(1, 2) + grad_scores @ k,
        k=grad_scores.transpose(1, 2) @ q + decays.after * grad_kept,
        updates=(scores * decays.between).transpose(1, 2) @ grad_out + (decays.after * k) @ grad_next,
        decays=Decays(
            between=grad_weights * scores,
            before=(grad_out * (q @ state)).sum(-1, keepdim=True),
            after=(grad_kept * k).sum(-1, keepdim=True),
            whole=(grad_next * state).sum((1, 2), keepdim=True),
        ),
        state=q.transpose(1, 2) @ grad_read + decays.whole * grad_next,
    )


def of_each_head(x: Tensor, num_heads: int) -> Tensor:
    """Repeats groups for their heads: [L, G, K] -> [H, L, K], where head h uses group h // (H / G)."""
    return x.transpose(0, 1).repeat_interleave(num_heads // x.shape[1], dim=0)


def of_each_group(x: Tensor, num_groups: int) -> Tensor:
    """Sums the heads of each group, the gradient of `of_each_head`: [H, L, K] -> [L, G, K]."""
    return x.unflatten(0, (num_groups, -1)).sum(1).transpose(0, 1)
