"""Recurrent layers for many chunks at once: the plain ones to rounding, and the same bits in any row."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from xorl.kernels import recurrent
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.recurrent import batched

# One token, less than the taps, less than a chunk, a chunk, and more chunks than a batch has.
LENGTHS = [1, 37, 3, 128, 1200, 1, 64, 2]
# The inputs that have tokens.
OF_TOKENS = {"state_space": (0, 1, 3, 4), "causal_conv": (0,)}
names = pytest.mark.parametrize("name", OF_TOKENS)


def make_inputs(name: str, num_tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Of heads in groups; decays from almost none to almost all."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    if name == "causal_conv":
        return [draw(num_tokens, 7), draw(7, 4), draw(7)]
    dt, a = F.softplus(draw(num_tokens, 4, dtype=wide).mul(2).exp()), -draw(4, dtype=wide).exp()
    return [draw(num_tokens, 4, 5), dt, a, draw(num_tokens, 2, 6), draw(num_tokens, 2, 6), draw(4, dtype=wide)]


def compute(module: object, name: str, inputs: list[Tensor], lengths: list[int], grad: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    leaves, layout = [x.detach().clone().requires_grad_() for x in inputs], SequenceLayout.from_lengths(lengths)
    others = ("silu",) if name == "causal_conv" else ()
    out = getattr(module, name)(*leaves, *others, layout)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@names
def test_they_compute_what_the_plain_ones_do(name: str) -> None:
    # Catches a state of another chunk or document, and gradients that end with a batch.
    inputs = make_inputs(name, sum(LENGTHS), torch.float64)
    grad = torch.randn_like(inputs[0])
    found, wanted = (compute(module, name, inputs, LENGTHS, grad) for module in (batched, recurrent))
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine - theirs).abs().max() <= 1e-13 * theirs.abs().max()


@names
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_document_is_the_same_in_any_row(name: str, dtype: torch.dtype) -> None:
    # Catches products whose shape, and so their rounding, depends on the rest of the row.
    inputs = make_inputs(name, sum(LENGTHS), dtype)
    grad = torch.randn_like(inputs[0])
    packed, start = compute(batched, name, inputs, LENGTHS, grad), 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        own = [x[rows] if i in OF_TOKENS[name] else x for i, x in enumerate(inputs)]
        alone = compute(batched, name, own, [length], grad[rows])
        for index in (0, *(each + 1 for each in OF_TOKENS[name])):
            # A CPU rounds sigmoids of the last elements of a tensor differently.
            tolerance = (
                {"rtol": 1e-2 if dtype == torch.bfloat16 else 1e-6, "atol": 1e-7}
                if name == "causal_conv"
                else {"rtol": 0, "atol": 0}
            )
            torch.testing.assert_close(alone[index], packed[index][rows], **tolerance)
        start += length


def test_states_continue_a_document_and_have_gradients() -> None:
    # Catches states of another document, and gradients that do not reach the earlier tokens.
    inputs = make_inputs("state_space", 1300, torch.float64)
    states = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    layout, results = SequenceLayout.from_lengths([1250, 50]), []
    for module in (batched, recurrent):
        leaves = [x.detach().clone().requires_grad_() for x in (*inputs, states)]
        out, after = module.state_space_with_states(*leaves[:6], layout, leaves[6])
        (out.sin().sum() + after.cos().sum()).backward()
        results.append([out.detach(), after.detach(), *(x.grad for x in leaves)])
    for mine, theirs in zip(*results, strict=True):
        assert (mine - theirs).abs().max() <= 1e-12 * theirs.abs().max()


@names
def test_one_compilation_serves_every_row(name: str) -> None:
    # Catches a graph break, and lengths that become constants of compiled code.
    compilations = 0

    def counting(graph, example_inputs):
        nonlocal compilations
        compilations += 1
        return graph

    others = ("silu",) if name == "causal_conv" else ()
    operator = getattr(batched, name)
    compiled = torch.compile(operator, fullgraph=True, backend=counting)
    for lengths in ([5, 3], [2, 70, 1], [9, 4]):
        layout = SequenceLayout.from_lengths(lengths)
        layout.mark_dynamic()
        inputs = make_inputs(name, layout.num_tokens, torch.float32)
        for index in OF_TOKENS[name]:
            torch._dynamo.mark_dynamic(inputs[index], 0)
        assert torch.equal(compiled(*inputs, *others, layout), operator(*inputs, *others, layout))
    assert compilations == 1
