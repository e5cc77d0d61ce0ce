"""Rows of a table by id on a GPU: the gradient is the sum of all positions, rounded once, for few and for many ids."""

import pytest
import torch
from torch.nn import functional as F

from xorl.core.nn.lookup import MOST_SUMMED_IN_GROUPS, look_up

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

NUM_ROWS, WIDTH = 12, 96


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("num_ids", [1, 700, MOST_SUMMED_IN_GROUPS, MOST_SUMMED_IN_GROUPS + 1, 20000])
def test_gradient_is_rounded_once(num_ids, deterministic):
    """Catches sums in bf16 by the kernel that torch chooses for this number of ids, and one with random order."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(NUM_ROWS, (num_ids,), generator=generator).cuda()
    table = torch.randn(NUM_ROWS, WIDTH, generator=generator).bfloat16().cuda()
    # Gradients of one sign, so that the sums grow.
    rows_gradient = (1 + torch.rand(num_ids, WIDTH, generator=generator)).bfloat16().cuda()

    def gradient_of(function, table):
        table = table.clone().requires_grad_()
        function(ids, table).backward(rows_gradient.to(table.dtype))
        return table.grad

    found, again = gradient_of(look_up, table), gradient_of(look_up, table)
    assert torch.equal(found, again)
    rounded = torch.finfo(torch.bfloat16).eps / 2
    torch.testing.assert_close(found.double(), gradient_of(F.embedding, table.double()), rtol=1.01 * rounded, atol=0)
