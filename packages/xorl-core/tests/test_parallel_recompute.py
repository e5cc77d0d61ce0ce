"""Recomputation keeps less and changes nothing."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from live_bytes import LiveBytes
from tiny_decoders import summed_loss, tiny_decoder
from tiny_models import hf_config
from xorl.core.models import Decoder
from xorl.core.nn import LayerKernels
from xorl.core.nn.latent import LatentAttention
from xorl.core.parallel.activations import Recompute, recompute_layers
from xorl.kernels.attention.reference import eager_attention
from xorl.kernels.attention.sdpa import sdpa_attention
from xorl.kernels.layout import SequenceLayout

HF_CONFIG = hf_config(num_hidden_layers=3)
LENGTHS = [5, 9, 40, 10]
ATTENTION = {"eager": eager_attention, "sdpa": sdpa_attention}


def model_with(
    recompute: Recompute, attention: str, *, num_layers: int | None = None, reentrant: bool = False
) -> Decoder:
    model = tiny_decoder(HF_CONFIG, kernels=LayerKernels(attention=ATTENTION[attention]))
    recompute_layers(model.layers, recompute, num_layers=num_layers, reentrant=reentrant)
    return model


def step(model: Decoder) -> tuple[dict[str, Tensor], int]:
    """The gradients by name, and the bytes kept between forward and backward."""
    with LiveBytes() as live:
        loss = summed_loss(model, torch.arange(sum(LENGTHS)) % 64, LENGTHS)
        kept = live.held()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, kept


@pytest.mark.parametrize("attention", ATTENTION)
def test_recomputation_changes_no_bit_and_keeps_less(attention: str) -> None:
    # Catches a policy that keeps everything, or nothing, under another name, and a recomputed value that differs.
    reference, whole = step(model_with("none", attention))
    kept = {"none": whole}
    for name, recompute in {"operation": "operation", "mlp": ("mlp",), "layer": "layer"}.items():
        gradients, kept[name] = step(model_with(recompute, attention))
        torch.testing.assert_close(gradients, reference, rtol=0, atol=0)
    assert kept["layer"] < kept["mlp"] < kept["none"]
    assert kept["layer"] < kept["operation"] < kept["none"]


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_latents_are_kept_instead_of_the_heads_projected_from_them(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Catches expanded heads that are kept, and latents that are computed twice.
    config = hf_config(family, num_hidden_layers=2, qk_nope_head_dim=24, v_head_dim=20)
    products: list[tuple[int, ...]] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.name() == "aten::mm":
                products.append(tuple(args[1].shape))
            return func(*args, **(kwargs or {}))

    def measured(policy: Recompute) -> tuple[dict[str, Tensor], int, list[tuple[int, ...]]]:
        model = tiny_decoder(config)
        recompute_layers(model.layers, policy, reentrant=False)
        products.clear()
        with Products():
            gradients, kept = step(model)
        return gradients, kept, sorted(products)

    reference, whole, once = measured("none")
    gradients, kept, products_again = measured("operation")
    torch.testing.assert_close(gradients, reference, rtol=0, atol=0)
    layers = tiny_decoder(config).layers
    expansions = [linear for layer in layers for linear in layer.self_attn.expansions]
    features = [(linear.in_features, linear.out_features) for linear in expansions]
    again = list(products_again)
    for product in once:
        again.remove(product)
    assert again == sorted(features)
    monkeypatch.setattr(LatentAttention, "expansions", ())
    more = sum(linear.out_features for linear in expansions) * sum(LENGTHS) * 4
    assert measured("operation")[1] - kept == more
    assert kept < whole


def test_layers_after_the_first_few_keep_everything() -> None:
    # Catches a number of layers that is for all of them, or for the last ones.
    whole, kept, none = (step(model_with("layer", "eager", num_layers=number))[1] for number in (None, 1, 0))
    assert kept == pytest.approx((whole + 2 * none) / 3, rel=0.01)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_above_frozen_ones_get_their_gradients(reentrant: bool) -> None:
    # Catches layers that silently do not train, as adapters from the second layer on did beside a norm of the trunk.
    def gradients(model: Decoder) -> dict[str, Tensor]:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(("model.layers.1.self_attn", "model.norm")))
        return {name: gradient for name, gradient in step(model)[0].items() if gradient is not None}

    expected = gradients(model_with("none", "eager"))
    assert any("layers.1" in name for name in expected)
    measured = gradients(model_with("layer", "eager", reentrant=reentrant))
    torch.testing.assert_close(measured, expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("reentrant", [False, True])
def test_nothing_is_marked_for_recomputation_without_a_gradient(reentrant: bool) -> None:
    # Catches an evaluation at which torch warns that there will be no gradients, as if training had none.
    model = model_with("layer", "eager", reentrant=reentrant)
    layout = SequenceLayout.from_lengths(LENGTHS)
    with torch.no_grad():
        logits = model(torch.arange(layout.num_tokens) % 64, layout)
    assert torch.equal(logits, model_with("none", "eager")(torch.arange(layout.num_tokens) % 64, layout))


@pytest.mark.parametrize("recompute", ["layer", "operation"])
def test_attention_runs_again_only_where_its_output_is_not_kept(recompute: Recompute) -> None:
    # Catches an attention operator that the policy does not know by name, and so computes twice.
    calls = 0

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal calls
            name = func.name()
            calls += name.endswith(("mm", "attention_for_cpu")) or name.startswith("xorl::attention_sdpa")
            return func(*args, **(kwargs or {}))

    def count(policy: Recompute) -> int:
        nonlocal calls
        model, calls = model_with(policy, "sdpa"), 0
        with Calls():
            step(model)
        return calls

    assert (count(recompute) > count("none")) == (recompute == "layer")
