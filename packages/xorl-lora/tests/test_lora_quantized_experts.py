"""QLoRA over a mixture of experts: what it computes, keeps and merges, and which experts are quantised."""

import copy
import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tiny_decoders import summed_loss, train_as_if_
from tiny_models import hf_config
from xorl.core.models import SPECS, Decoder, DecoderConfig
from xorl.core.parallel.activations import recompute_layers
from xorl.core.parallel.compile import compile_layers
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.quant import QuantScheme
from xorl.lora import AdapterSpec, adapter_parameters, adapters, init_adapters, inject, merge_, quantize_
from xorl.lora.merge import fold_, merged_rows
from xorl.lora.quantize import quantizable_layers, quantize_layers
from xorl.lora.quantized import (
    AdaptiveNoise,
    QuantizedExpertLinear,
    num_parameters,
    quantized_layers,
    quantized_rows,
    read_rows,
    write_rows_,
)

SCHEMES = {"nf4": QuantScheme("nf4", 32), "nvfp4": QuantScheme("nvfp4", 16), "block_fp8": QuantScheme("block_fp8", 32)}
SPEC = SPECS["Qwen3MoeForCausalLM"]
# Three layers, of which the second has no experts. All widths differ.
SHAPE = hf_config(
    "qwen3_moe",
    hidden_size=96,
    moe_intermediate_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    mlp_only_layers=[1],
    num_experts=5,
)
EVERYWHERE = ("q_proj", "gate_proj", "up_proj", "down_proj")
LENGTHS = [9, 1, 14, 5]
LAYOUT = SequenceLayout.from_lengths(LENGTHS)
IDS = torch.randint(64, (LAYOUT.num_tokens,), generator=torch.Generator().manual_seed(0))
EXPERTS = "model.layers.0.mlp.experts"


def decoder(scheme: QuantScheme | None, *, exclude: Sequence[str] = ()) -> Decoder:
    """A model whose weights are functions of the seed, quantised as they are drawn."""
    with torch.device("meta"):
        model = SPEC.build(SPEC.config_from_hf(SHAPE))
    if scheme is not None:
        quantize_layers(model, quantizable_layers(model, exclude, "exclude"), scheme)
    model.to_empty(device="cpu")
    model.init_weights(0, targets=quantized_rows(model))
    return model


def adapt(model: Decoder, targets: Sequence[str]) -> None:
    """Add adapters that are not zero."""
    inject(model, AdapterSpec(rank=3, alpha=6.0, targets=tuple(targets)))
    init_adapters(model, seed=0)
    train_as_if_(adapter_parameters(model), scale=0.05)


def trained(model: Decoder) -> tuple[float, dict[str, Tensor]]:
    """The loss, and the gradients of the adapters."""
    value = summed_loss(model.train(), IDS, LENGTHS, IDS.roll(-1)) / len(IDS)
    value.backward()
    gradients = {name: parameter.grad for name, parameter in adapter_parameters(model).items()}
    assert all(gradient is not None for gradient in gradients.values())
    return value.item(), gradients


def assert_near(measured: tuple[float, dict[str, Tensor]], wanted: tuple[float, dict[str, Tensor]]) -> None:
    assert measured[0] == pytest.approx(wanted[0], rel=1e-6)
    assert measured[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert (measured[1][name] - gradient).norm() <= 1e-6 + 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("targets", [EVERYWHERE, ("q_proj", "o_proj"), ("down_proj",)], ids=",".join)
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("quant_format", SCHEMES)
def test_a_mixture_trains_over_quantised_experts_as_over_their_dequantised_weights(
    quant_format: str, noisy: bool, targets: tuple[str, ...]
) -> None:
    # Catches experts with another one's scales, noise in one pass alone, and adapters that miss the quantised experts.
    model, plain = decoder(SCHEMES[quant_format]), decoder(None)
    layers = quantized_layers(model)
    assert sum(isinstance(layer, QuantizedExpertLinear) for layer in layers.values()) == 4
    model.train()
    if noisy:
        AdaptiveNoise(model, alpha=0.5, seed=0).set_step(3)
    for path, layer in layers.items():
        weight = plain.get_submodule(path).weight
        rows = read_rows(layer)
        assert 0 < (rows - weight).norm() < 0.12 * weight.norm()
        if isinstance(layer, QuantizedExpertLinear):
            rows = layer.stacked(torch.float32).dense(torch.float32).flatten(0, 1)
        elif noisy:
            rows = layer.base(torch.eye(layer.in_features)).t()
        assert noisy == (not torch.equal(rows, read_rows(layer)))
        with torch.no_grad():
            weight.copy_(rows)
    adapt(model, targets)
    adapt(plain, targets)
    assert_near(trained(model), trained(plain))


@pytest.mark.parametrize(
    ("quant_format", "recompute"), [("nf4", "none"), ("nvfp4", "layer"), ("block_fp8", "operation")]
)
def test_recomputed_and_compiled_layers_compute_the_same(quant_format: str, recompute: str) -> None:
    # Catches a graph break, a graph for each layer, and recomputation with other weights.
    torch._dynamo.reset()
    wanted, model = decoder(SCHEMES[quant_format]), decoder(SCHEMES[quant_format])
    for one in (wanted, model):
        AdaptiveNoise(one, alpha=0.5, seed=0).set_step(3)
        adapt(one, EVERYWHERE)
    recompute_layers(model.layers, recompute, experts=True, reentrant=False, compiled=True)
    compile_layers(list(model.layers), backend="aot_eager", device_type="cpu")
    assert_near(trained(model), trained(wanted))


def test_dense_weights_of_experts_are_not_kept() -> None:
    # Catches a dequantised layer that is saved for the backward pass: 48 of them would not fit into memory.
    model = decoder(SCHEMES["nf4"])
    adapt(model, EVERYWHERE)
    dense_sizes = {layer.num_rows * layer.in_features for layer in quantized_layers(model).values()}
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor), tensor)[1], lambda x: x):
        trained(model)
    assert not [one.shape for one in kept if one.is_floating_point() and one.numel() in dense_sizes]


def test_matrices_of_experts_have_their_own_global_scales() -> None:
    # Catches the gates of all experts, or gate and up, quantised by the largest of all, which loses bits.
    model = decoder(SCHEMES["nvfp4"])
    layer = quantized_layers(model)[f"{EXPERTS}.gate_up_proj"]
    assert layer.part_rows == (64,) * 10
    before, rows = read_rows(layer), decoder(None).get_parameter(f"{EXPERTS}.gate_up_proj.weight").detach()
    rows[64:128] *= 1000  # up of the first expert
    write_rows_(layer, rows)
    after = read_rows(layer)
    assert torch.equal(after[:64], before[:64])
    assert torch.equal(after[128:], before[128:])
    assert after[64:128].norm().item() == pytest.approx(1000 * before[64:128].norm().item(), rel=0.1)


@pytest.mark.parametrize("quant_format", SCHEMES)
def test_merging_quantises_the_merged_experts_again(quant_format: str) -> None:
    # Catches adapters of other experts, a merge from rounded weights, and scales that are kept.
    model = decoder(SCHEMES[quant_format])
    adapt(model, EVERYWHERE)
    before = copy.deepcopy(model)
    fold_(model)
    pairs: dict[str, list] = {}
    for adapter in adapters(before).values():
        pairs.setdefault(adapter.path, []).append(adapter.pair)
    for path, layer in quantized_layers(before).items():
        write_rows_(layer, merged_rows(layer, pairs.get(path, [])))
        assert torch.equal(read_rows(quantized_layers(model)[path]), read_rows(layer)), path
    adapter = adapters(before)[f"{EXPERTS}.up_proj"]
    plain = decoder(SCHEMES[quant_format]).get_submodule(f"{EXPERTS}.gate_up_proj")
    wanted = (
        read_rows(plain).view(5, 2, 64, 96)[3, 1]
        + adapter.scale * adapter.B.view(5, 64, 3)[3] @ adapter.A.view(5, 3, 96)[3]
    )
    found = read_rows(quantized_layers(model)[f"{EXPERTS}.gate_up_proj"]).view(5, 2, 64, 96)[3, 1]
    assert (found - wanted).norm() < 0.12 * wanted.norm()


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        ((), 4),
        (("experts",), 0),
        (("mlp.experts", "o_proj"), 0),
        (("0.mlp.experts",), 2),
        (("model.layers.2.mlp.experts",), 2),
        (("*.mlp.experts",), 0),
        (("gate_proj", "up_proj"), 2),
        (("down_proj",), 2),
        (("mlp.gate",), 4),
        (("lm_head", "self_attn"), 4),
    ],
)
def test_experts_are_left_out_by_name(exclude: tuple[str, ...], left: int) -> None:
    # Catches a name that is known and leaves nothing out, and the router's, which is the start of the gate's.
    layers = quantized_layers(decoder(SCHEMES["nf4"], exclude=exclude))
    assert sum(isinstance(layer, QuantizedExpertLinear) for layer in layers.values()) == left
    assert any("self_attn" in path for path in layers) == ("self_attn" not in exclude)


@pytest.mark.parametrize(
    ("scheme", "exclude", "message"),
    [
        (SCHEMES["nf4"], ("gate_proj",), "gate_proj shares one matrix with .* and 2 others: name all of them"),
        (SCHEMES["nf4"], ("experts.1",), "experts.1.gate_proj shares one matrix with"),
        (QuantScheme("nf4", 64), (), r"group_size: .*rows of 96 weights cannot be divided into groups of 64"),
        (
            QuantScheme("block_fp8", 128),
            (),
            r"group_size: 4 layers do not fit block_fp8: .*gate_up_proj \[128, 96\] \(the 64 rows of each expert's "
            r"matrices cannot be divided into blocks of 128\)",
        ),
    ],
)
def test_what_does_not_fit_experts_is_refused(scheme: QuantScheme, exclude: tuple[str, ...], message: str) -> None:
    # Catches blocks that reach from one expert to the next, which another rank may hold.
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        decoder(scheme, exclude=exclude)


def test_experts_are_quantised_in_a_model_that_has_its_weights() -> None:
    # Catches a function for any module that refuses experts, or quantises those that have adapters.
    model, wanted = decoder(None), decoder(SCHEMES["nf4"])
    paths = quantize_(model, SCHEMES["nf4"], targets=("experts.gate_proj", "experts.up_proj", "experts.down_proj"))
    assert len(paths) == 4
    for path in paths:
        assert torch.equal(read_rows(quantized_layers(model)[path]), read_rows(quantized_layers(wanted)[path]))
    other = decoder(None)
    adapt(other, EVERYWHERE)
    with pytest.raises(ValueError, match=r"gate_up_proj.* has an adapter"):
        quantize_(other, SCHEMES["nf4"], targets=("experts.gate_proj", "experts.up_proj"))


@pytest.mark.parametrize(("quant_format", "gib"), [("nf4", 16.85), ("nvfp4", 16.95), ("block_fp8", 29.03)])
def test_a_base_of_30_billion_parameters_takes_what_its_formats_say(quant_format: str, gib: float) -> None:
    # Catches experts that stay as they are, which would take 54 GiB.
    shape = {
        **SHAPE,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    }
    config: DecoderConfig = SPEC.config_from_hf(shape)
    with torch.device("meta"):
        model = SPEC.build(config).bfloat16()
    groups = {"nf4": 64, "nvfp4": 16, "block_fp8": 128}
    quantize_layers(model, quantizable_layers(model, (), "exclude"), QuantScheme(quant_format, groups[quant_format]))
    assert num_parameters(model) == 30_532_122_624
    sizes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert sizes / 2**30 == pytest.approx(gib, abs=0.1)


def test_a_merge_into_dequantised_weights_restores_experts() -> None:
    # Catches rows of another expert, and a decoder that cannot be run or saved after the merge.
    model = decoder(SCHEMES["nf4"])
    inject(model, AdapterSpec(4, targets=EVERYWHERE))
    for parameter in adapter_parameters(model).values():
        torch.nn.init.normal_(parameter, std=0.1)
    with torch.no_grad():
        expected = model(IDS, LAYOUT)
        merge_(model, dequantize_to=torch.float32)
        assert not quantized_layers(model)
        assert dict(model.named_parameters()).keys() == dict(decoder(None).named_parameters()).keys()
        torch.testing.assert_close(model(IDS, LAYOUT), expected, rtol=1e-4, atol=1e-4)
