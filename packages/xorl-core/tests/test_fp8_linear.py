"""Linear layers in fp8: errors no larger than the formats make them, and the same under a compiler."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from tiny_decoders import tiny_decoder
from tiny_models import hf_config
from xorl.core.nn import Linear
from xorl.core.nn.fp8 import Fp8Linear, convert_linears
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.linear_ce import linear_cross_entropy
from xorl.kernels.quant.fp8 import E4M3, E5M2

RECIPES = ["tensorwise", "rowwise"]
RELATIVE = {E4M3: 2.0**-4, E5M2: 2.0**-3}
SMALLEST_NORMAL = {E4M3: 2.0**-6, E5M2: 2.0**-14}
TOP = {E4M3: 448.0, E5M2: 57344.0}


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_linear(bias=True, width=48, out=64):
    linear = Linear(width, out, bias=bias)
    with torch.no_grad():
        for seed, parameter in enumerate(linear.parameters(), start=1):
            parameter.copy_(0.2 * randn(*parameter.shape, seed=seed))
    return linear


def rounding(x, dtype, dim):
    """The largest error of each value of x in fp8 with a scale for everything or along `dim`, in fp64.

    A scale is a power of two within a factor of two of the largest that fits, and so is the smallest normal number.
    """
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    smallest = 2 * largest / TOP[dtype] * SMALLEST_NORMAL[dtype]
    return RELATIVE[dtype] * torch.maximum(x.abs(), smallest)


def product_bound(a, a_error, b, b_error):
    """How far a' @ b' may be from a @ b: |a' - a| |b| + |a'| |b' - b|, and a little for sums in fp32."""
    a, b = a.abs(), b.abs()
    return a_error @ b + (a + a_error) @ b_error + 1e-5 * (a @ b)


@pytest.mark.parametrize("num_tokens", [1, 16, 37])
@pytest.mark.parametrize("recipe", RECIPES)
def test_output_and_gradients_are_off_by_no_more_than_the_formats_make_them(recipe, num_tokens):
    # Catches scales along an axis that is not contracted, padding that counts, and a gradient of another matrix.
    linear = make_linear()
    x, grad = randn(num_tokens, 48).requires_grad_(), randn(num_tokens, 64, seed=9) * 1e-4
    layer = Fp8Linear(linear, recipe)
    y = layer(x)
    y.backward(grad)
    by_row = recipe == "rowwise"
    gradient_format = E4M3 if by_row else E5M2
    wide_x, wide_w, wide_g = x.detach().double(), layer.weight.detach().double(), grad.double()

    def along(dim):
        return dim if by_row else None

    cases = {
        "output": (y - layer.bias, wide_x, E4M3, wide_w.t(), E4M3),
        "gradient of the input": (x.grad, wide_g, gradient_format, wide_w, E4M3),
        "gradient of the weight": (layer.weight.grad, wide_g.t(), gradient_format, wide_x, E4M3),
    }
    for name, (got, a, a_format, b, b_format) in cases.items():
        a_error, b_error = rounding(a, a_format, along(1)), rounding(b, b_format, along(0))
        difference = (got.detach().double() - a @ b).abs()
        assert bool((difference <= product_bound(a, a_error, b, b_error)).all()), name
        mean = (difference.norm() / (a @ b).norm()).item()
        assert 5e-3 < mean < (0.06 if a_format == E4M3 else 0.12), f"{name}: {mean:.3f} is not the error of fp8"
    torch.testing.assert_close(layer.bias.grad, grad.sum(0))


@pytest.mark.parametrize("recipe", RECIPES)
def test_output_without_gradients_is_the_same(recipe):
    # Catches an evaluation that computes something else than training.
    layer = Fp8Linear(make_linear(), recipe)
    x = randn(3, 7, 48, dtype=torch.bfloat16)
    with torch.no_grad():
        without = layer(x)
    assert without.shape == (3, 7, 64)
    assert without.dtype == torch.bfloat16
    assert torch.equal(without, layer(x))


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_activation_is_kept_in_one_byte(recipe):
    # Catches bf16 activations or a transposed weight kept for the backward pass, which is what memory is spent on.
    layer = Fp8Linear(make_linear(bias=False), recipe).bfloat16()
    x = randn(32, 48, dtype=torch.bfloat16).requires_grad_()
    kept = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(x)
    bytes_of_x = [tensor.nbytes for tensor in kept if 32 in tensor.shape]
    assert bytes_of_x == [32 * 48]
    weights = [tensor for tensor in kept if tensor.numel() == 48 * 64]
    assert [tensor.shape for tensor in weights] == [(64, 48)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = make_linear(), make_linear(bias=False, width=64, out=48)
        self.gate = make_linear(bias=False)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_is_what_it_is_without(recipe, dtype):
    # Catches a graph break, a compilation for each length, and gradients that tracing loses.
    block = Block()
    convert_linears(block, recipe, exclude=())
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block.forward, fullgraph=True, backend=counter, dynamic=True)
    for num_tokens in (40, 37, 64):
        x = randn(num_tokens, 48, dtype=dtype)
        results = []
        for forward in (block.forward, compiled):
            leaf = x.clone().requires_grad_()
            block.zero_grad()
            y = forward(leaf)
            y.backward(randn(*y.shape, seed=5, dtype=dtype))
            results.append([y, leaf.grad, *(parameter.grad for parameter in block.parameters())])
        for got, wanted in zip(*results, strict=True):
            assert wanted.any()
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert counter.frame_count == 1


def test_conversion_takes_linear_layers_and_leaves_what_is_excluded():
    # Catches a router or head in fp8, a parameter that is renamed or copied, and features that no fp8 unit takes.
    block = Block()
    before = dict(block.named_parameters())
    assert convert_linears(block, "tensorwise") == ("up", "down")
    assert type(block.gate) is Linear
    assert isinstance(block.up, Fp8Linear)
    after = dict(block.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is parameter for name, parameter in before.items())
    odd = nn.Sequential(Linear(48, 64, bias=False), Linear(64, 40, bias=False))
    with pytest.raises(ValueError, match=r"fp8: .* multiples of 16, .* 1 \[40, 64\]; set fp8=\"none\""):
        convert_linears(odd, "rowwise")
    assert type(odd[0]) is Linear


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_small_model_learns_as_in_bf16(recipe):
    # Catches errors that add up in one direction: gradients of the wrong scale, copies of weights that are not renewed.
    values = hf_config(intermediate_size=64, num_attention_heads=2, initializer_range=0.02)
    ids = torch.randint(64, (96,), generator=torch.Generator().manual_seed(0))
    layout = SequenceLayout.from_lengths([48, 48])
    losses = {}
    for chosen in ("none", recipe):
        model = tiny_decoder(values)
        model.compute_dtype = torch.bfloat16
        if chosen != "none":
            convert_linears(model.layers, chosen)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses[chosen] = []
        for _ in range(60):
            loss = model(ids, layout, lambda h, w: linear_cross_entropy(h, w, ids.roll(-1))[0].mean())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[chosen].append(loss.item())
    assert losses["none"][-1] < 1.0
    assert losses[recipe][::10] == pytest.approx(losses["none"][::10], rel=0.05)
