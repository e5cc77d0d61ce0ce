"""Ulysses context parallelism (arXiv:2309.14509): ranks exchange tokens for heads around attention.

Each rank has a part of the tokens of a row and all heads. For attention it has all tokens and its share of the heads,
so every attention function works unchanged, including documents and windows.

Shapes: T tokens of the row, P ranks, H query heads, G key/value heads, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from xorl.kernels.layout import RankGroup
from xorl.kernels.torch_private import all_to_all_autograd

HeadsAttention = Callable[[Tensor, Tensor, Tensor], Tensor]


def ulysses_attention(attention: HeadsAttention, q: Tensor, k: Tensor, v: Tensor, group: RankGroup) -> Tensor:
    """`attention` over all ranks' tokens, from q [T / P, H, C] and k, v [T / P, G, C] of this rank's: [T / P, H, C].

    Heads of values may have another number of channels, which those of the result then have.

    P divides H. If there are more ranks than key/value heads, each of these goes to several ranks. Collective.
    """
    num_ranks = group.size
    if k.shape[1] % num_ranks:
        assert num_ranks % k.shape[1] == 0, "checked when the model was built"
        k, v = (x.repeat_interleave(num_ranks // k.shape[1], dim=1) for x in (k, v))
    widths = [x.shape[2] for x in (q, k, v)]
    shares = columns_of_all_tokens([x.flatten(1) for x in (q, k, v)], group)
    q, k, v = (x.unflatten(1, (-1, width)) for x, width in zip(shares, widths, strict=True))
    out = attention(q, k, v)  # [T, H / P, C]
    return tokens_of_all_columns(out.flatten(1), group).unflatten(1, (-1, out.shape[-1]))


def columns_of_all_tokens(parts: Sequence[Tensor], group: RankGroup) -> list[Tensor]:
    """Each of `parts`, [T / P, N] of this rank's tokens and all columns, as [T, N / P] of all tokens and its columns.

    In one exchange. P divides each N. Collective.
    """
    by_rank = [part.unflatten(1, (group.size, -1)) for part in parts]  # [T / P, P, N / P]
    mine = _exchange(torch.cat(by_rank, dim=2).transpose(0, 1), group)  # by the rank of the tokens
    return list(mine.flatten(0, 1).split([part.shape[2] for part in by_rank], dim=1))


def tokens_of_all_columns(x: Tensor, group: RankGroup) -> Tensor:
    """Reverses `columns_of_all_tokens`: [T, N / P] of all tokens becomes [T / P, N] of all columns. Collective."""
    whole = _exchange(x.unflatten(0, (group.size, -1)), group)  # by the rank of the columns
    return whole.transpose(0, 1).flatten(1)


def check_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    """Raise ValueError unless the heads can be shared by `num_ranks` ranks."""
    if num_heads % num_ranks == 0 and (num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0):
        return
    works = [
        size
        for size in range(1, num_heads + 1)
        if num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)
    ]
    nearest = min(works, key=lambda size: (abs(size - num_ranks), size))
    raise ValueError(
        f"ulysses: {num_ranks} ranks cannot share {num_heads} heads with {num_kv_heads} key/value "
        f"heads; the nearest size that works is {nearest}"
    )


def _exchange(x: Tensor, group: RankGroup) -> Tensor:
    """Send x[i] to rank i, and return what each rank sent: [P, ..]."""
    sizes = [1] * group.size
    return all_to_all_autograd(x, sizes, sizes, group.name)
