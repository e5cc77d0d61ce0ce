"""Attention over a cache against attention over whole sequences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from xorl.kernels.attention import AttentionSpec, KeyValueCache, MixedLayout, cached_attention
from xorl.kernels.attention.reference import eager_attention
from xorl.kernels.layout import SequenceLayout

BLOCK = 4
CPU = torch.device("cpu")
TABLES = [[7, 2, 9], [0], [5, 11, 1, 3]]
LENGTHS = [9, 3, 14]


def make_cache(num_kv_heads: int, dtype: torch.dtype) -> KeyValueCache:
    cache = KeyValueCache(layers=[(num_kv_heads, 8)] * 2, num_blocks=12, block_size=BLOCK, dtype=dtype, device=CPU)
    # What is not written here belongs to somebody else.
    for each in (*cache.keys, *cache.values):
        each.fill_(float("nan"))
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, None), (0.5, None), (None, torch.linspace(-1, 2, 4))])
def test_pieces_are_as_the_whole(
    num_kv_heads: int, window: int | None, dtype: torch.dtype, softcap: float | None, sinks: Tensor | None
) -> None:
    # Catches a cap or sinks that generation forgets, rows, masks or windows that are off by one, sequences that see
    # others, and layers that share rows.
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(LENGTHS), heads, 8, generator=generator).to(dtype) for heads in (4, num_kv_heads, num_kv_heads)
    )
    spec = AttentionSpec(0.3, window, softcap)
    wanted = eager_attention(q, k, v, SequenceLayout.from_lengths(LENGTHS), spec, sinks)
    cache = make_cache(num_kv_heads, dtype)
    got = torch.full_like(q, float("nan"))
    starts = [0, 9, 12]
    done = [0, 0, 0]
    for counts in ((4, 1, 0), (1, 1, 6), (1, 0, 1), (0, 1, 1), (3, 0, 6)):
        which = [index for index, count in enumerate(counts) if count]
        rows = [torch.arange(starts[i] + done[i], starts[i] + done[i] + counts[i]) for i in which]
        tokens = torch.cat(rows)
        done = [before + count for before, count in zip(done, counts, strict=True)]
        layout = MixedLayout(
            cache, [TABLES[i] for i in which], [counts[i] for i in which], [done[i] for i in which], CPU
        )
        torch.testing.assert_close(layout.positions, positions_of(tokens, starts))
        arguments = (q[tokens], k[tokens], v[tokens])
        cached_attention(*(x + 1 for x in arguments), layout.of_layer(0), spec, sinks)
        got[tokens] = cached_attention(*arguments, layout.of_layer(1), spec, sinks)
    assert done == LENGTHS
    # Half precision is rounded within, too.
    torch.testing.assert_close(got, wanted, **({} if dtype == torch.float32 else {"rtol": 0.016, "atol": 4e-3}))


def positions_of(tokens: Tensor, starts: list[int]) -> Tensor:
    begins = torch.tensor(starts)
    return tokens - begins[torch.searchsorted(begins, tokens, right=True) - 1]


def test_packed_rows_are_the_rows_of_all_tokens() -> None:
    # Catches the kernels of GPUs reading other rows than the plain twin does.
    layout = MixedLayout(make_cache(1, torch.float32), TABLES, [1, 2, 14], LENGTHS, CPU)
    padded = layout.padded_rows()
    wanted = torch.cat([row[:length] for row, length in zip(padded, LENGTHS, strict=True)])
    assert torch.equal(layout.packed_rows(), wanted)
    assert wanted[:9].tolist() == [28, 29, 30, 31, 8, 9, 10, 11, 36]
    assert layout.key_starts.tolist() == [0, 9, 12, 26]
