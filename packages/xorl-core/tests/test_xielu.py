"""xIELU and its gradients against the plain formula; `tests/golden` compares them with transformers."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from xorl.core.nn.xielu import XIELU

VALUES = {"alpha_p": 0.3, "alpha_n": -0.7, "beta": 0.4, "eps": -0.25}
# On both sides of 0 and of eps, and at 0.
ROWS = torch.tensor([[-9.0, -1.5, -0.3, -0.2], [-1e-3, 0.0, 0.4, 7.0], [0.1, -0.26, 2.5, -40.0]])


def made(dtype: torch.dtype) -> XIELU:
    module = XIELU().to(dtype)
    with torch.no_grad():
        for name, value in VALUES.items():
            module.get_parameter(name).fill_(value)
    return module


def plain(module: XIELU, x: Tensor) -> Tensor:
    """The definition, which autograd differentiates."""
    beta, eps = module.beta, module.eps
    negative = (torch.expm1(torch.minimum(x, eps)) - x) * (beta + F.softplus(module.alpha_n))
    return torch.where(x > 0, F.softplus(module.alpha_p) * x * x, negative) + beta * x


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_values_and_gradients_are_those_of_the_formula(dtype: torch.dtype, tolerance: float) -> None:
    # Catches a branch or a derivative that is off, above 0, from eps on, and below eps.
    found = []
    for function in (lambda module, x: module(x), plain):
        module, x = made(dtype), ROWS.to(dtype, copy=True).requires_grad_()
        out = function(module, x)
        out.backward(torch.linspace(-1, 2, out.numel(), dtype=dtype).view(out.shape))
        found.append((out.detach(), x.grad, module.alpha_p.grad, module.alpha_n.grad))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    # Catches steps in half precision: sums of scalars' gradients over many tokens would not grow beyond a few hundred.
    module, x = made(torch.float32), ROWS.to(dtype).repeat(1000, 1).requires_grad_()
    out = module(x)
    out.backward(torch.full_like(out, 0.5))
    rounded = made(torch.float32)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.to(dtype))
    wide = x.detach().float().requires_grad_()
    expected = plain(rounded, wide)
    expected.backward(torch.full_like(expected, 0.5))
    assert torch.equal(out, expected.to(dtype))
    torch.testing.assert_close(x.grad, wide.grad.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-3)
    for name in ("alpha_p", "alpha_n"):
        got, wanted = module.get_parameter(name).grad, rounded.get_parameter(name).grad
        torch.testing.assert_close(got, wanted, rtol=1e-2 if dtype == torch.bfloat16 else 2e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_gradients_are_those_of_eager_torch(dtype: torch.dtype) -> None:
    # Catches a function whose gradient torch.compile loses, or takes as 0.
    found = []
    for is_compiled in (False, True):
        module, x = made(torch.float32), ROWS.to(dtype, copy=True).requires_grad_()
        out = torch.compile(module, backend="aot_eager", fullgraph=True)(x) if is_compiled else module(x)
        out.sum().backward()
        found.append((out.detach(), x.grad, module.alpha_p.grad, module.alpha_n.grad))
    for compiled, eager in zip(*found[::-1], strict=True):
        assert torch.equal(compiled, eager)


def test_constants_are_not_trained() -> None:
    # Catches an optimizer that moves beta or eps.
    assert {name for name, parameter in XIELU().named_parameters() if parameter.requires_grad} == {"alpha_p", "alpha_n"}
