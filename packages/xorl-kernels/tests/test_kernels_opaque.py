"""Plain forms that a compiler calls as they are."""

import pytest
import torch

from xorl.kernels.fused import opaque, reference


def inputs_of(name: str, dtype: torch.dtype) -> tuple:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(8, generator=generator).requires_grad_()
    angles = torch.rand(6, 4, generator=generator)
    inputs = {"rms_norm": (x, weight, 1e-6), "swiglu": (x,), "apply_rope": (x, (angles.cos(), angles.sin()))}
    return inputs[name]


def outcome(function, inputs: tuple) -> list[torch.Tensor]:
    result = function(*inputs)
    weighted = result * torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view_as(result)
    leaves = [value for value in inputs if isinstance(value, torch.Tensor)]
    return [result, *torch.autograd.grad(weighted.sum(), leaves)]


def compiled_to_graphs(function):
    """`function` by way of the graphs of its forward and backward pass."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "apply_rope"])
def test_values_and_gradients_are_those_of_the_plain_form(name, dtype):
    # Catches a form that rounds otherwise, a gradient that is lost, and one for what wants none.
    inputs = inputs_of(name, dtype)
    expected = outcome(getattr(reference, name), inputs)
    for function in (getattr(opaque, name), compiled_to_graphs(getattr(opaque, name))):
        for got, wanted in zip(outcome(function, inputs), expected, strict=True):
            assert torch.equal(got, wanted)


def test_rounding_to_bf16_keeps_the_dtype_and_the_input():
    # Catches a result that is the input's memory, which an operator must not give.
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.linspace(0, 1, 7).to(dtype)
        rounded = opaque.round_to_bf16(x)
        assert torch.equal(rounded, x.bfloat16().to(dtype))
        assert rounded.data_ptr() != x.data_ptr()


def test_a_frozen_weight_gets_no_gradient():
    # Catches gradients that are given to the wrong inputs where only some are wanted.
    x, weight, eps = inputs_of("rms_norm", torch.float32)
    normed = opaque.rms_norm(x, weight.detach(), eps)
    [gradient] = torch.autograd.grad(normed.sum(), [x])
    [expected] = torch.autograd.grad(reference.rms_norm(x, weight.detach(), eps).sum(), [x])
    assert torch.equal(gradient, expected)
