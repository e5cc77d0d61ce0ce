"""Rows by id: the gradient of a low-precision table is the fp32 sum of all positions, rounded once."""

import pytest
import torch
from torch.nn import functional as F

from xorl.core.nn import Embedding
from xorl.core.nn.lookup import look_up

NUM_ROWS, WIDTH = 11, 5


def gradient_of(function, ids, table, rows_gradient, padding_idx=None):
    """The rows, and the gradient of the table."""
    table = table.clone().requires_grad_()
    rows = function(ids, table, padding_idx)
    rows.backward(rows_gradient.to(rows.dtype))
    return rows.detach(), table.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padding_idx", [None, 3, -1])
@pytest.mark.parametrize("shape", [(1,), (700,), (4, 30), (0,)])
def test_gradient_is_rounded_once(dtype, padding_idx, shape):
    """Catches sums in low precision, which are off by several per cent here, and a padding row that is trained."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(NUM_ROWS - 2, shape, generator=generator)
    table = torch.randn(NUM_ROWS, WIDTH, generator=generator).to(dtype)
    # Gradients of one sign, so that the sums grow.
    rows_gradient = (1 + torch.rand(*shape, WIDTH, generator=generator)).to(dtype)
    rows, gradient = gradient_of(look_up, ids, table, rows_gradient, padding_idx)
    expected_rows, expected = gradient_of(F.embedding, ids, table.double(), rows_gradient, padding_idx)
    assert gradient.dtype == rows.dtype == dtype
    assert torch.equal(rows, expected_rows.to(dtype))
    rounded = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(gradient.double(), expected, rtol=1.01 * rounded, atol=0)


def test_wide_tables_and_the_module():
    """Catches a module that passes other ids or another padding row on, and an fp32 table that takes another path."""
    ids = torch.tensor([3, 1, 3, 0])
    embedding = Embedding(NUM_ROWS, WIDTH, padding_idx=1)
    torch.nn.init.normal_(embedding.weight)
    rows_gradient = torch.ones(len(ids), WIDTH)
    rows, expected = gradient_of(F.embedding, ids, embedding.weight.detach(), rows_gradient, 1)
    for dtype in (torch.float32, torch.bfloat16):
        embedding = embedding.to(dtype)
        embedding.weight.grad = None
        found = embedding(ids)
        found.backward(rows_gradient.to(dtype))
        assert torch.equal(found, rows.to(dtype))
        assert torch.equal(embedding.weight.grad, expected.to(dtype))  # small integers are exact
