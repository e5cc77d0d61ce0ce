"""The comparison that kernel tests rely on must itself fail when a kernel is wrong."""

import pytest
import torch

from xorl.kernels.testing import TOLERANCES, assert_close, assert_matches_reference, nan_poisoned_empty

X = torch.linspace(-1, 1, 24).reshape(6, 4)


class WrongGradient(torch.autograd.Function):
    """Squares, with a gradient that is one percent off."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, *grad_outputs):
        (x,) = ctx.saved_tensors
        return 2.02 * x * grad_outputs[0]


def drop_last_row(x):
    """Squares all but the last row and leaves that one as the allocator gave it."""
    out = torch.empty_like(x)
    out[:-1] = x[:-1] ** 2
    return out + 0 * x


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (lambda x: x * x * 1.0001, "output 0: worst error"),
        (WrongGradient.apply, "gradient of input 0: worst error"),
        (drop_last_row, "output 0: 4 values are not finite"),
        (lambda x: (x * x)[:-1], r"output 0: shape \[5, 4\], expected \[6, 4\]"),
        (lambda x: (x * x, x), "2 outputs, but the reference has 1"),
    ],
)
def test_a_wrong_kernel_fails(kernel, message):
    """Catches a comparison that checks only shapes, only outputs, or memory that was never written."""
    with pytest.raises(AssertionError, match=message):
        assert_matches_reference(kernel, lambda x: x * x, (X,))


def test_a_right_kernel_passes_in_each_precision():
    """Catches tolerances that the dtype itself cannot meet."""
    for dtype in TOLERANCES:
        assert_matches_reference(lambda x: (x @ x.t(), x.exp()), lambda x: (x @ x.t(), x.exp()), (X.to(dtype),))


def test_one_lost_row_of_many_is_not_within_tolerance():
    """Catches a mean-only comparison in which one wrong row among thousands disappears."""
    wanted = torch.ones(10_000, 4)
    got = wanted.clone()
    got[17] = 0
    with pytest.raises(AssertionError, match="rows: worst error"):
        assert_close("rows", got, wanted, TOLERANCES[torch.bfloat16])


def test_poison_reaches_every_allocator_and_the_backward_pass():
    """Catches uninitialised memory that happens to hold zeros when tested."""
    seen = []

    class Allocates(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, *grad_outputs):
            seen.append(torch.empty_like(grad_outputs[0]))
            return grad_outputs[0]

    with nan_poisoned_empty():
        seen += [torch.empty(3), X.new_empty(3), torch.empty_like(X), torch.empty_strided((2, 2), (2, 1))]
        Allocates.apply(X.clone().requires_grad_()).sum().backward()
        assert torch.empty(3, dtype=torch.int64).dtype == torch.int64
    assert len(seen) == 5
    assert all(x.isnan().all() for x in seen)
