"""The inputs and results of attention kernels.

Shapes: T tokens, S tokens with keys, N documents, H query heads, G key/value heads, C channels of a head.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class AttentionSpec(NamedTuple):
    """The computation of attention from queries, keys and values.

    Attributes:
        scale: multiplies the scores.
        window: a token sees itself and the `window` - 1 tokens before it; None: all tokens before it.
        softcap: scaled scores become softcap * tanh(scores / softcap); None: no cap.
        causal: a token does not see later ones. Otherwise it sees all tokens of its document, and there is no window.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    causal: bool = True


Gradients = tuple[Tensor, Tensor, Tensor]


class Documents(NamedTuple):
    """Where the documents of some rows begin and end, as in `SequenceLayout`.

    Attributes:
        cu_seqlens: [N + 1] int32 on the device.
        offsets: the same as int64 on the host.
    """

    cu_seqlens: Tensor
    offsets: Tensor

    @property
    def longest(self) -> int:
        """The number of tokens of the longest document."""
        return int(self.offsets.diff().max())


class ForwardKernel(Protocol):
    """(q [T, H, C], k and v [S, G, C], ...) -> (output [T, H, C], log-sum-exp [H, T] in fp32, fp64 for fp64).

    There is at least one token. The rows of q are the ends of the documents whose keys are given: query i of m sees the
    first n - m + i + 1 of n keys of its document, as far as the window allows, or all if attention is not causal.
    Without context parallelism, `key_documents` is `documents`. With `deterministic`, the same inputs must give the
    same bits. Heads of values may have another width V only for kernels that take it (`PackedAttention`); the output
    has it.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents,
        key_documents: Documents,
        spec: AttentionSpec,
        *,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor]: ...


class BackwardKernel(Protocol):
    """The gradients of q, k and v, given the gradient of the output ([T, H, C], contiguous) and the forward results."""

    def __call__(
        self,
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
    ) -> Gradients: ...


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of log-sum-exps for q and k of `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def visible_pairs(
    offsets: Tensor, window: int | None, key_offsets: Tensor | None = None, *, causal: bool = True
) -> int:
    """The number of (query, key) pairs in all documents; a token sees itself and earlier tokens in its window.

    Without `causal`, it sees all tokens of its document.

    `key_offsets` are those of the keys if there are more keys than queries; the queries are the last ones.
    """

    def pairs(lengths: Tensor) -> Tensor:
        seen = lengths if window is None else lengths.clamp(max=window)
        return seen * (seen + 1) // 2 + (lengths - seen) * seen

    lengths = offsets.diff()
    key_lengths = lengths if key_offsets is None else key_offsets.diff()
    if not causal:
        return int((lengths * key_lengths).sum())
    return int((pairs(key_lengths) - pairs(key_lengths - lengths)).sum())
