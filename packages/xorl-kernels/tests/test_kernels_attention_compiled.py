"""Attention inside compiled code: no graph break, and no compilation for each new row."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from xorl.kernels.attention import ATTENTION, AttentionRequest, AttentionSpec, resolve_attention
from xorl.kernels.layout import SequenceLayout

BACKENDS = ATTENTION.runnable(AttentionRequest("cpu", torch.float32, head_dim=16))
# One thing at a time: first the longest document alone, then the number of documents, then the number of tokens.
ROWS = ([5, 3], [4, 4], [6, 1, 1], [9], [2] * 40, [64], [7, 57], [1, 1], [1, 30, 1, 1], [2, 1])


class Layer(nn.Module):
    """Projections around attention and a residual connection, as in a decoder layer."""

    def __init__(self, backend: str, window: int | None) -> None:
        super().__init__()
        self.attention = resolve_attention(backend, AttentionRequest("cpu", torch.float32, 16, window))
        self.window = window
        self.qkv = nn.Linear(32, 8 * 16)
        self.out = nn.Linear(4 * 16, 32)

    def forward(self, x, layout):
        q, k, v = (y.unflatten(-1, (-1, 16)) for y in self.qkv(x).split([64, 32, 32], dim=-1))
        return x + self.out(self.attention(q, k, v, layout, AttentionSpec(0.25, self.window)).flatten(-2))


def gradients(layer, forward, x, layout, marked):
    """The output of `forward`, and the gradients of its input and of the layer's parameters."""
    x = x.clone().requires_grad_()
    if marked:
        layout.mark_dynamic()
        torch._dynamo.maybe_mark_dynamic(x, 0)
    out = forward(x, layout)
    return out, *torch.autograd.grad(out.square().sum(), (x, *layer.parameters()))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("marked", [True, False], ids=["marked dynamic", "not marked"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_compiles_once_for_all_rows(backend, marked, window):
    """Catches a graph break, a guard on the documents' lengths or number, and a compiled gradient that is another."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer, counter = Layer(backend, window), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer.forward, fullgraph=True, backend=counter)
    for lengths in ROWS:
        layout, x = SequenceLayout.from_lengths(lengths), torch.randn(sum(lengths), 32)
        results = (gradients(layer, forward, x, layout, marked) for forward in (compiled, layer))
        for got, wanted in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted)
    # Unmarked, each of the two numbers is taken for a constant until it changes.
    assert counter.frame_count <= (1 if marked else 3)
