"""Sinks and capped scores of rows that ranks share, beside those of one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from ranks import Launch, Launches
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.nn.attention import sharded_attention
from xorl.kernels.attention import AttentionSpec
from xorl.kernels.attention.reference import eager_attention
from xorl.kernels.layout import SequenceLayout
from xorl.train.rows import part_of

LENGTHS = [17, 1, 22]
SPECS = (AttentionSpec(0.3), AttentionSpec(0.3, window=5), AttentionSpec(0.3, window=30, softcap=1.5))
RANKS = {"ring": {"ring": 2}, "ulysses": {"ulysses": 2}, "both": {"ring": 2, "ulysses": 2}}


def inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    # Values are wider than keys.
    shapes = [(sum(LENGTHS), heads, width) for heads, width in ((8, 8), (4, 8), (4, 12))]
    return *(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes), torch.linspace(-2, 3, 8)


def computed(sizes: dict[str, int]) -> list[tuple[Tensor, ...]]:
    """Output and gradients of q, k and v of this rank's tokens, and its terms of the gradient of sinks."""
    mesh, whole = Mesh(ParallelDims(**sizes), "cpu"), SequenceLayout.from_lengths(LENGTHS)
    layout = part_of(whole, mesh)
    found = []
    for spec in SPECS:
        *rows, sinks = inputs()
        leaves = [*(layout.local(x).clone().requires_grad_() for x in rows), sinks.requires_grad_()]
        if layout is whole:
            out = eager_attention(*leaves[:3], whole, spec, leaves[3])
        else:
            out = sharded_attention(eager_attention, *leaves[:3], layout, spec, leaves[3])
        factors = layout.local(torch.arange(1.0, 1 + sum(LENGTHS)))[:, None, None]
        found.append((out.detach(), *torch.autograd.grad((out * factors).sin().sum(), leaves)))
    places = layout.local(torch.arange(sum(LENGTHS)))
    return [(places, *tensors) for tensors in found]


@pytest.fixture(scope="module")
def found(launch: Launch) -> Launches:
    cells = {("whole",): (1, partial(computed, {}))}
    for name, sizes in RANKS.items():
        cells[(name,)] = (4 if name == "both" else 2, partial(computed, sizes))
    return launch(cells)


@pytest.mark.parametrize("name", RANKS)
def test_ranks_that_share_a_row_have_its_sinks(name: str, found: Launches) -> None:
    # Catches sinks of other heads, sinks that a ring drops or adds for each rank, and a gradient that counts twice.
    [whole] = found("whole")
    by_rank = found(name)
    for index, (_, *wanted) in enumerate(whole):
        places = torch.cat([one[index][0] for one in by_rank]).argsort()
        for got, exact in zip(zip(*(one[index][1:5] for one in by_rank), strict=True), wanted[:4], strict=True):
            torch.testing.assert_close(torch.cat(got)[places], exact, rtol=0, atol=1e-12)
        torch.testing.assert_close(sum(one[index][5] for one in by_rank), wanted[4], rtol=1e-5, atol=1e-5)
