"""A frozen linear layer with a low-rank product beside it, against its plain twin, as it is and compiled."""

import pytest
import torch
from torch import Tensor

from xorl.kernels.low_rank import adapted_linear
from xorl.kernels.quant import GROUP_SIZES, QuantScheme, adapted_quantized_linear, quantized_linear


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor) -> Tensor:
    y = x @ (weight + up @ down).t()
    return y if bias is None else y + bias


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(("sizes", "has_bias"), [((17, 24, 40, 3), True), ((1, 7, 5, 1), False)])
def test_output_and_gradients_are_those_of_the_summed_weight(
    sizes: tuple[int, int, int, int], has_bias: bool, dtype: torch.dtype, tolerance: float, compiled: bool
) -> None:
    # Catches a factor taken the other way round, and a summand that compiled code changes while it is still read.
    tokens, inputs, outputs, rank = sizes
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x, weight, down, up = draw(tokens, inputs), draw(outputs, inputs), draw(rank, inputs), draw(outputs, rank)
    bias, grad = draw(outputs) if has_bias else None, draw(tokens, outputs)
    results = []
    torch._dynamo.reset()
    function = torch.compile(adapted_linear, fullgraph=True, backend="aot_eager") if compiled else adapted_linear
    for each, wide in ((function, dtype), (plain, torch.float64)):
        leaves = [tensor.to(wide, copy=True).requires_grad_() for tensor in (x, down, up)]
        y = each(leaves[0], weight.to(wide), None if bias is None else bias.to(wide), leaves[1], leaves[2])
        y.backward(grad.to(wide))
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for measured, expected in zip(*results, strict=True):
        assert measured.dtype == dtype
        assert (measured.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("quant_format", ["nf4", "block_fp8"])
def test_over_quantised_weights_it_is_the_sum_of_two_products(quant_format: str, compiled: bool) -> None:
    # Catches a gradient of x that lacks one of its two parts, and arguments of the two products that differ.
    generator = torch.Generator().manual_seed(0)
    scheme = QuantScheme(quant_format, GROUP_SIZES[quant_format])
    weight = scheme.quantize(torch.randn(128, 128, generator=generator), None)
    arguments = (weight.codes, weight.scales, None, quant_format, GROUP_SIZES[quant_format], 128)

    def summed(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        return quantized_linear(x, *arguments) + (x @ down.t()) @ up.t()

    def adapted(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        return adapted_quantized_linear(x, down, up, *arguments)

    torch._dynamo.reset()
    function = torch.compile(adapted, fullgraph=True, backend="aot_eager") if compiled else adapted
    values = [torch.randn(shape, generator=generator) for shape in ((9, 128), (4, 128), (128, 4))]
    results = []
    for each in (function, summed):
        leaves = [value.clone().requires_grad_() for value in values]
        y = each(*leaves)
        y.square().sum().backward()
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for measured, expected in zip(*results, strict=True):
        assert (measured - expected).norm() <= 1e-5 * expected.norm()


def test_nothing_but_the_operands_and_the_small_product_is_kept() -> None:
    # Catches outputs that are kept for the backward pass, and the gradient of a weight that is frozen.
    x, weight = torch.randn(8, 16, requires_grad=True), torch.randn(32, 16)
    down, up = torch.randn(2, 16, requires_grad=True), torch.randn(32, 2, requires_grad=True)
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        adapted_linear(x, weight, None, down, up)
    assert sorted(kept) == sorted([(8, 16), (32, 16), (2, 16), (32, 2), (8, 2)])
