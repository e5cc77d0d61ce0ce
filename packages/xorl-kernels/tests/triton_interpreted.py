"""Fused kernels against their plain twins in Triton's interpreter; test_kernels_fused.py runs this file.

bf16 is left to tests/gpu: in the interpreter it is not what a GPU computes.
"""

import pytest
import torch

from xorl.kernels.fused import cross_entropy, reference
from xorl.kernels.testing import TOLERANCES, assert_close, nan_poisoned_empty

DTYPES = [torch.float32, torch.float16]


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "stride"), [(1, 2, 2), (5, 37, 64), (3, 4096, 4096), (2, 5001, 5056)]
)
@pytest.mark.parametrize("in_place", [False, True])
def test_cross_entropy_rows(num_rows, num_columns, stride, dtype, weighted, in_place):
    # Catches a wrong border of a block, a gradient that overwrites what is still to be read, and rows that are padded.
    buffer = torch.full((num_rows, stride), float("nan"), dtype=dtype)
    logits = buffer[:, :num_columns]
    logits.copy_(4 * randn(num_rows, num_columns))
    labels = torch.randint(num_columns, (num_rows,), generator=torch.Generator().manual_seed(1))
    if num_rows > 1:
        labels[1] = -100
        labels[0] = logits[0].argmax()
    token_weight = randn(num_rows) if weighted else None
    wanted_gradient = torch.empty(num_rows, num_columns, dtype=torch.float64)
    wide_weight = None if token_weight is None else token_weight.double()
    wanted = reference.cross_entropy_rows(logits.double(), labels, wide_weight, wanted_gradient)
    with nan_poisoned_empty():
        gradient = logits if in_place else torch.empty(num_rows, num_columns, dtype=torch.float16)
        loss, correct = cross_entropy.cross_entropy_rows(logits, labels, token_weight, gradient)
    assert_close("loss", loss, wanted[0], TOLERANCES[torch.float32])
    assert torch.equal(correct, wanted[1])
    assert_close("gradient", gradient, wanted_gradient, TOLERANCES[gradient.dtype])
    assert bool(buffer[:, num_columns:].isnan().all())


def test_cross_entropy_rows_without_gradient_leaves_the_logits_alone():
    # Catches an evaluation that overwrites its logits.
    logits = randn(3, 50)
    before = logits.clone()
    cross_entropy.cross_entropy_rows(logits, torch.tensor([1, -100, 49]), None, None)
    assert torch.equal(logits, before)


def test_equal_logits_make_the_first_one_the_choice():
    # Catches an accuracy of 1 for a model that says the same of every token.
    labels = torch.tensor([0, 1, 4999])
    _, correct = cross_entropy.cross_entropy_rows(torch.zeros(3, 5000), labels, None, None)
    assert correct.tolist() == [True, False, False]


def test_a_vocabulary_masked_with_infinities_and_a_label_outside_of_it():
    # Catches NaN from lanes that have seen -inf alone, and memory read beyond a row, which would pass for a loss.
    logits = torch.full((2, 5000), float("-inf"))
    logits[:, 4500:4502] = 0.0
    gradient = torch.empty_like(logits)
    loss, correct = cross_entropy.cross_entropy_rows(logits, torch.tensor([4501, 5000]), None, gradient)
    assert loss[0].item() == pytest.approx(0.6931472)
    assert gradient[0].nonzero().flatten().tolist() == [4500, 4501]
    assert loss[1].isnan()
    assert gradient[1].isnan().all()
    assert correct.tolist() == [False, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1.0, -0.5])
def test_scale(dtype, factor):
    # Catches a factor that is applied twice, not at all, or not to the last block.
    x = randn(7, 2501, dtype=dtype)
    wanted = x * factor
    cross_entropy.scale_(x, torch.tensor(factor))
    assert torch.equal(x, wanted)
