"""State spaces in Triton against plain torch, in Triton's interpreter; test_kernels_fused.py runs this."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from xorl.kernels import recurrent
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.recurrent import space_triton
from xorl.kernels.testing import nan_poisoned_empty

# One token, less than a chunk, a chunk, and two with a rest.
LENGTHS = [1, 37, 64, 130]
# Heads, groups, channels of a head and of its states: less than a block, and more than one.
SIZES = [(4, 2, 5, 6), (2, 1, 80, 72)]


def make_inputs(sizes: tuple[int, int, int, int]) -> list[Tensor]:
    """Decays from almost none to almost all."""
    num_heads, num_groups, head_dim, state_dim = sizes
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    num_tokens = sum(LENGTHS)
    dt, a = F.softplus(draw(num_tokens, num_heads) * 2 - 1), -draw(num_heads).exp()
    b, c = (draw(num_tokens, num_groups, state_dim) for _ in range(2))
    return [draw(num_tokens, num_heads, head_dim), dt, a, b, c, draw(num_heads)]


def compute(module: object, inputs: list[Tensor], lengths: list[int], grad: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = module.state_space(*leaves, SequenceLayout.from_lengths(lengths))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_state_spaces_and_their_gradients(sizes):
    # Catches states of another chunk or document, tokens after the end of one, and channels beyond a block.
    inputs = make_inputs(sizes)
    grad = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    with nan_poisoned_empty():
        found = compute(space_triton, inputs, LENGTHS, grad)
    wanted = compute(recurrent, [x.double() for x in inputs], LENGTHS, grad.double())
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == torch.float32
        # The gradient of a is a sum of numbers of both signs.
        assert (mine - theirs).norm() <= 1e-4 * theirs.norm()


def test_a_document_is_the_same_in_any_row():
    inputs = make_inputs(SIZES[0])
    grad = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    packed, start = compute(space_triton, inputs, LENGTHS, grad), 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        own = [x[rows] if len(x) == sum(LENGTHS) else x for x in inputs]
        alone = compute(space_triton, own, [length], grad[rows])
        for place in (0, 1, 2, 4, 5):
            assert torch.equal(alone[place], packed[place][rows])
        start += length
