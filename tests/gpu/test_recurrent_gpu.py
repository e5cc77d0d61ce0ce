"""Layers with a recurrence on a GPU: the library's functions against plain torch, alone and in a model."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton.runtime import Autotuner

from tiny_decoders import tiny_decoder
from tiny_models import hf_config
from xorl.core.models import Decoder
from xorl.core.nn import LayerKernels
from xorl.core.parallel.compile import compile_layers
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.linear_ce import linear_cross_entropy
from xorl.kernels.recurrent import PLAIN_RECURRENCE, RecurrenceFns, RecurrenceRequest, resolve_recurrence

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
# Relative, in norm; rounding to bf16 gives 4e-3 to 5e-3.
TOLERANCE = 1e-2
LENGTHS = [200, 70, 1, 64, 3, 241]
# Key heads, value heads, channels of keys and of values.
SHAPES = [(2, 4, 128, 128), (3, 3, 64, 128), (1, 4, 128, 64), (2, 2, 256, 256)]


def library(shape: tuple[int, int, int, int]) -> RecurrenceFns:
    """The library's functions, which are certified for these heads."""
    try:
        return resolve_recurrence("fla", RecurrenceRequest("cuda", BF16, (shape[2], shape[3])))
    except RuntimeError as error:
        if "cannot run here" in str(error):
            pytest.skip(str(error))
        raise


def draw(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def delta_inputs(shape: tuple[int, int, int, int], num_tokens: int) -> list[Tensor]:
    key_heads, value_heads, key_dim, value_dim = shape
    q, k = (draw(num_tokens, key_heads, key_dim, dtype=torch.float32, seed=seed) for seed in (0, 1))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q * key_dim**-0.5, k))
    g = -draw(num_tokens, value_heads, dtype=torch.float32, seed=3).abs()
    beta = draw(num_tokens, value_heads, dtype=torch.float32, seed=4).sigmoid()
    return [q.to(BF16), k.to(BF16), draw(num_tokens, value_heads, value_dim, seed=2), g, beta]


def with_gradients(
    compute: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor, dtype: torch.dtype | None = None
) -> list[Tensor]:
    leaves = [x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in inputs]
    out = compute(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def assert_match(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    errors = [float((mine.float() - theirs).norm() / theirs.norm()) for mine, theirs in zip(found, wanted, strict=True)]
    assert max(errors) <= TOLERANCE, errors


def tuned_kernels() -> set[str]:
    """The kernels of the library for which a configuration was chosen by timing."""
    found = set()
    for module in [module for name, module in sys.modules.items() if name.startswith("fla.")]:
        for name, kernel in list(vars(module).items()):
            while not isinstance(kernel, Autotuner) and hasattr(kernel, "fn"):
                kernel = kernel.fn
            if isinstance(kernel, Autotuner) and kernel.cache:
                found.add(name)
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gated_delta_rule_is_that_of_plain_torch(shape: tuple[int, int, int, int]) -> None:
    # Catches wrong gradients of the compiler, and states or decays that cross borders.
    layout = SequenceLayout.from_lengths(LENGTHS, device="cuda")
    inputs, grad = delta_inputs(shape, layout.num_tokens), draw(layout.num_tokens, shape[1], shape[3], seed=5)
    delta = library(shape).gated_delta
    found = with_gradients(lambda *x: delta(*x, layout), inputs, grad)
    wanted = with_gradients(lambda *x: PLAIN_RECURRENCE.gated_delta(*x, layout), inputs, grad, torch.float32)
    assert_match(found, wanted)
    again = with_gradients(lambda *x: delta(*x, layout), inputs, grad)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    assert tuned_kernels() == set()
    for start, stop in zip(layout.offsets.tolist(), layout.offsets.tolist()[1:], strict=False):
        own = SequenceLayout.from_lengths([stop - start], device="cuda")
        alone = with_gradients(
            lambda *x, own=own: delta(*x, own), [x[start:stop] for x in inputs], grad[start:stop].contiguous()
        )
        assert all(torch.equal(one, other[start:stop]) for one, other in zip(alone, found, strict=True))


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize(("num_channels", "num_taps"), [(96, 4), (8192, 4), (100, 3)])
def test_convolutions_are_those_of_plain_torch(num_channels: int, num_taps: int, activation: str | None) -> None:
    # Catches taps that reach into the document before, and channels beyond a block.
    layout = SequenceLayout.from_lengths(LENGTHS, device="cuda")
    inputs = [draw(layout.num_tokens, num_channels), draw(num_channels, num_taps, seed=1)]
    grad = draw(layout.num_tokens, num_channels, seed=2)
    conv = library(SHAPES[0]).causal_conv
    found = with_gradients(lambda x, w: conv(x, w, None, activation, layout), inputs, grad)
    plain = PLAIN_RECURRENCE.causal_conv
    wanted = with_gradients(lambda x, w: plain(x, w, None, activation, layout), inputs, grad, torch.float32)
    assert_match(found, wanted)
    # A part of wider rows, as a layer has it.
    wide = draw(layout.num_tokens, num_channels + 8)
    part = wide[:, 8:]
    assert torch.equal(
        conv(part, inputs[1], None, activation, layout), conv(part.contiguous(), inputs[1], None, activation, layout)
    )


@pytest.mark.parametrize("num_channels", [64, 128, 256])
def test_norms_are_those_of_plain_torch(num_channels: int) -> None:
    # Catches a scale that is rounded to bf16, and an epsilon of another meaning.
    functions = library(SHAPES[0])
    x, gate, grad = (draw(sum(LENGTHS), 3, num_channels, seed=seed) for seed in (0, 1, 2))
    weight = draw(num_channels, seed=3)
    for scale in (1.0, num_channels**-0.5):
        found = with_gradients(lambda x, scale=scale: functions.unit_norm(x, scale), [x], grad)
        plain = with_gradients(lambda x, scale=scale: PLAIN_RECURRENCE.unit_norm(x, scale), [x], grad, torch.float32)
        assert_match(found, plain)
    found = with_gradients(lambda *x: functions.gated_norm(*x, 1e-6), [x, weight, gate], grad)
    assert tuned_kernels() == set()
    assert_match(
        found, with_gradients(lambda *x: PLAIN_RECURRENCE.gated_norm(*x, 1e-6), [x, weight, gate], grad, torch.float32)
    )


# Heads, groups, channels of a head and of its states.
SPACES = [(4, 2, 64, 128), (8, 1, 32, 16), (16, 8, 64, 256), (4, 1, 16, 32), (4, 2, 24, 48), (6, 2, 80, 96)]


@pytest.mark.parametrize("name", ["batched", "triton"])
@pytest.mark.parametrize("space", SPACES, ids=str)
def test_state_spaces_are_those_of_plain_torch(space: tuple[int, int, int, int], name: str) -> None:
    # Catches products whose bits depend on the rest of the row, and gradients that end with a batch of chunks.
    num_heads, num_groups, head_dim, state_dim = space
    functions = resolve_recurrence(name, RecurrenceRequest("cuda", BF16, states=(head_dim, state_dim)))
    lengths = [*LENGTHS, 2500]
    layout = SequenceLayout.from_lengths(lengths, device="cuda")
    num_tokens = layout.num_tokens
    dt = draw(num_tokens, num_heads, dtype=torch.float32, seed=1).exp() * 0.05
    a, d = (draw(num_heads, dtype=torch.float32, seed=seed) for seed in (2, 3))
    b, c = (draw(num_tokens, num_groups, state_dim, seed=seed) for seed in (4, 5))
    inputs = [draw(num_tokens, num_heads, head_dim), dt, -a.exp(), b, c, d]
    grad = draw(num_tokens, num_heads, head_dim, seed=6)
    found = with_gradients(lambda *x: functions.state_space(*x, layout), inputs, grad)
    wide = [x.float() for x in inputs]
    assert_match(found, with_gradients(lambda *x: PLAIN_RECURRENCE.state_space(*x, layout), wide, grad))
    for start, stop in zip(layout.offsets.tolist(), layout.offsets.tolist()[1:], strict=False):
        own = SequenceLayout.from_lengths([stop - start], device="cuda")
        parts = [x[start:stop] if len(x) == num_tokens else x for x in inputs]
        alone = with_gradients(lambda *x, own=own: functions.state_space(*x, own), parts, grad[start:stop])
        for index in (0, 1, 2, 4, 5):
            assert torch.equal(alone[index], found[index][start:stop])


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_a_model_with_state_spaces_trains_in_bf16_as_in_fp32(name: str) -> None:
    # Catches a compiled layer that computes something else.
    config = hf_config("nemotron_h", hidden_size=128, initializer_range=0.05, mamba_head_dim=16, ssm_state_size=32)
    functions = resolve_recurrence(name, RecurrenceRequest("cuda", BF16, states=(16, 32)))
    losses, gradients = [], []
    for each, dtype in ((PLAIN_RECURRENCE, torch.float32), (functions, BF16)):
        decoder = tiny_decoder(config, kernels=replace(LayerKernels(), recurrence=each)).to("cuda")
        if dtype == BF16:
            compile_layers(list(decoder.layers), backend="inductor", device_type="cuda")
        loss, found = loss_and_gradients(decoder, dtype)
        losses.append(loss)
        gradients.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    for name, wanted in gradients[0].items():
        assert (gradients[1][name] - wanted).norm() <= 0.1 * wanted.norm(), name


# Tokens go to all experts: in bf16, routers would choose others for some tokens, and so change all gradients.
FAMILIES = {
    "qwen3_5_text": {"head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 128},
    "qwen3_next": {
        "head_dim": 64,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 8,
    },
}


def loss_and_gradients(decoder: Decoder, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    layout = SequenceLayout.from_lengths(LENGTHS, device="cuda")
    ids = torch.arange(layout.num_tokens, device="cuda") * 7 % 64
    decoder.compute_dtype = dtype
    loss = decoder(ids, layout, lambda hidden, head: linear_cross_entropy(hidden, head.weight, ids.roll(-1))[0].sum())
    loss.backward()
    return float(loss), {name: parameter.grad for name, parameter in decoder.named_parameters()}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_trains_with_the_library_as_with_plain_torch(family: str, compiled: bool) -> None:
    # Catches an operator that a compiled layer computes differently, and what a layer hands to it in another form.
    config = hf_config(family, hidden_size=128, initializer_range=0.05, **FAMILIES[family])
    shape = (1, 1, config["linear_key_head_dim"], config["linear_value_head_dim"])
    losses, gradients = [], []
    for functions, dtype in ((PLAIN_RECURRENCE, torch.float32), (library(shape), BF16)):
        kernels = replace(LayerKernels(), recurrence=functions)
        decoder = tiny_decoder(config, kernels=kernels).to("cuda")
        if compiled and dtype == BF16:
            compile_layers(list(decoder.layers), backend="inductor", device_type="cuda")
        loss, found = loss_and_gradients(decoder, dtype)
        losses.append(loss)
        gradients.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    for name, wanted in gradients[0].items():
        assert (gradients[1][name] - wanted).norm() <= 0.1 * wanted.norm(), name
