"""Experts in fp8: operands are rounded along the contraction, and nothing else is."""

import pytest
import torch
from torch import Tensor

from experts_cases import SHAPES, gradients, inputs, routes, without
from xorl.kernels.experts import grouped, reference
from xorl.kernels.experts.adapted import Factors
from xorl.kernels.experts.gates import SILU, activate
from xorl.kernels.quant import fp8
from xorl.kernels.testing import nan_poisoned_empty


def rounded(x: Tensor) -> Tensor:
    """The values in E4M3 with a scale for each row."""
    codes, descale = fp8.cast_rowwise(x.contiguous(), fp8.E4M3)
    return codes.double() * descale[:, None]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("num_passes", "share"), [(1, 0.0), (3, 0.3), (40, 0.99)])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_in_fp8_round_their_operands_along_the_contraction(
    shape: tuple[int, ...], num_passes: int, share: float, recompute: bool
) -> None:
    # Catches a scale of another row, column or expert, a part that another implementation computes, and gradients of
    # weights that are in fp8, too. Experts differ in size. In fp32, a value may round to the next one in fp8.
    tensors, ids = inputs(shape, torch.float64), without(share, shape)
    with torch.no_grad():
        for weight in tensors[1:3]:
            weight *= 8.0 ** -torch.arange(shape[4])[:, None, None]
    with nan_poisoned_empty():
        out = grouped.experts(*tensors, ids, num_passes=num_passes, recompute=recompute, products="fp8")
        found = out, *gradients(out, tensors)
    x, gate_up, down, weights = (tensor.detach() for tensor in tensors)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = [torch.zeros_like(tensor) for tensor in (x, x, gate_up, down, weights)]
    for expert in range(shape[4]):
        tokens, choices = torch.where(ids == expert)
        weight, rows, grads = weights[tokens, choices, None], x[tokens], grad[tokens]
        up = (rounded(rows) @ rounded(gate_up[expert]).t()).requires_grad_()
        inner = activate(up, SILU)
        grad_inner = rounded(grads) @ rounded(down[expert].t()).t()
        (grad_up,) = torch.autograd.grad(inner, up, weight * grad_inner)
        inner = inner.detach()
        expected[0].index_add_(0, tokens, weight * (rounded(inner) @ rounded(down[expert]).t()))
        expected[1].index_add_(0, tokens, rounded(grad_up) @ rounded(gate_up[expert].t()).t())
        expected[2][expert] = grad_up.t() @ rows
        expected[3][expert] = grads.t() @ (weight * inner)
        expected[4][tokens, choices] = (grad_inner * inner).sum(-1)
        for mine, theirs in zip(found[2:4], expected[2:4], strict=True):
            assert (mine[expert] - theirs[expert]).norm() <= 3e-3 * theirs[expert].norm()
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() <= 3e-3 * theirs.norm()
    exact = reference.experts(*tensors, ids)
    assert share > 0.9 or (out - exact).norm() > 1e-2 * exact.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_adapters_that_add_nothing_leave_products_in_fp8_as_they_are(shape: tuple[int, ...]) -> None:
    # Catches adapted experts whose own products are in the compute dtype.
    tensors, ids = inputs(shape, torch.float64), routes("random", shape)
    x, gate_up, down, weights = tensors
    _, _, width, inner, num_experts = shape
    sizes = (4, width), (2 * inner, 4), (4, inner), (width, 4)
    factors = Factors(*(torch.zeros(num_experts, *size, dtype=x.dtype) for size in sizes))
    leaves = [x, weights]
    plain = grouped.experts(*tensors, ids, products="fp8")
    frozen = gate_up.detach(), down.detach()
    adapted = grouped.experts(x, *frozen, weights, ids, factors=factors, products="fp8")
    torch.testing.assert_close(adapted, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(adapted, leaves), gradients(plain, leaves), rtol=1e-9, atol=1e-9)
