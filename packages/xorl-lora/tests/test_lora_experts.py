"""Adapters on experts, of each alone or shared: gradients, files, merging, optimizers, and what is refused."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tiny_decoders import tiny_decoder
from tiny_models import hf_config
from xorl.core.models import Decoder
from xorl.core.nn.moe import MixtureOfExperts
from xorl.core.optim import MuonOptions, build_optimizer
from xorl.kernels.layout import SequenceLayout
from xorl.lora import AdapterSpec, adapter_parameters, adapters, init_adapters, inject, merge_
from xorl.lora.experts import ExpertLowRank
from xorl.lora.inject import base_parameters
from xorl.lora.merge import fold_
from xorl.lora.peft import InMemoryTensors, adapter_tensors, config_of, load_adapters, read_layout
from xorl.lora.spec import ExpertSharing

SHAPE = hf_config(
    "qwen3_moe",
    vocab_size=40,
    hidden_size=24,
    intermediate_size=20,
    num_hidden_layers=3,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=5,
    moe_intermediate_size=12,
    mlp_only_layers=[1],
    initializer_range=0.02,
)
TARGETS = ("q_proj", "gate_proj", "up_proj", "down_proj")
LAYER = "model.layers.0.mlp.experts"
SHARED = [sharing for sharing in get_args(ExpertSharing) if sharing != "none"]
# By sharing: the leaves of gate, up and down that are one for all experts.
LEAVES: dict[str, dict[str, str]] = {
    "none": {},
    "outer": {"gate_proj": "A", "up_proj": "A", "down_proj": "B"},
    "all": {"gate_proj": "AB", "up_proj": "AB", "down_proj": "AB"},
}


def decoder_of(spec: AdapterSpec | None, *, dtype: torch.dtype = torch.float64) -> Decoder:
    """With adapters that are not zero."""
    decoder = tiny_decoder(SHAPE)
    decoder.to(dtype)
    decoder.compute_dtype = dtype
    if spec is not None:
        inject(decoder, spec, seed=1)
        generator = torch.Generator().manual_seed(2)
        for parameter in adapter_parameters(decoder).values():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).mul(0.2).to(dtype)
    return decoder


def logits(decoder: Decoder) -> Tensor:
    ids = torch.arange(30) * 7 % 40
    return decoder(ids, SequenceLayout.from_lengths([13, 17]))


@pytest.mark.parametrize("sharing", get_args(ExpertSharing))
def test_gradients_are_those_of_merged_weights(sharing: ExpertSharing) -> None:
    # Catches adapters of other experts, gate and up that are swapped, scales that are lost, and shared factors whose
    # gradients are not the sum over the experts.
    decoder = decoder_of(shared_spec(sharing))
    assert [one for one in adapters(decoder) if "experts" in one][:3] == [
        f"{LAYER}.{name}" for name in ("gate_proj", "up_proj", "down_proj")
    ]
    merged = copy.deepcopy(decoder)
    merge_(merged)
    assert not adapters(merged)
    assert not [name for name, _ in merged.named_parameters() if "shared_factors" in name]
    torch.testing.assert_close(logits(decoder), logits(merged), rtol=1e-5, atol=1e-5)  # a merge is in fp64 here too
    merged.requires_grad_(True)
    for each in (decoder, merged):
        each.train()
        logits(each).square().sum().backward()
    experts = merged.model.layers[0].mlp.experts
    gate_up, down = (layer.weight.grad.unflatten(0, (5, -1)) for layer in (experts.gate_up_proj, experts.down_proj))
    of_weights = {"gate_proj": gate_up[:, :12], "up_proj": gate_up[:, 12:], "down_proj": down}
    for name, pair in experts_pairs(decoder).items():
        a, b = (pair.factor(leaf).unflatten(0, (pair.count(leaf), -1)) for leaf in ("A", "B"))
        expected_a = pair.scale * b.transpose(1, 2) @ of_weights[name]
        expected_b = pair.scale * of_weights[name] @ a.transpose(1, 2)
        for leaf, of_experts in (("A", expected_a), ("B", expected_b)):
            expected = of_experts.sum(0) if leaf in LEAVES[sharing].get(name, "") else of_experts.flatten(0, 1)
            found = pair.factor(leaf).grad
            assert found is not None
            assert (found - expected).norm() < 1e-5 * expected.norm(), (name, leaf)


@pytest.mark.parametrize("sharing", get_args(ExpertSharing))
@pytest.mark.parametrize("targets", [("gate_proj",), ("down_proj",), ("experts.up_proj", "q_proj")])
def test_some_projections_alone(sharing: ExpertSharing, targets: tuple[str, ...]) -> None:
    # Catches a projection without an adapter that gets one, or is expected to share, and products with a rank of 0.
    decoder = decoder_of(AdapterSpec(rank=4, targets=targets, expert_sharing=sharing))
    merged = copy.deepcopy(decoder)
    merge_(merged)
    torch.testing.assert_close(logits(decoder), logits(merged), rtol=1e-5, atol=1e-5)
    logits(decoder).sum().backward()
    grads = [parameter.grad for parameter in adapter_parameters(decoder).values()]
    assert all(grad is not None and grad.any() for grad in grads)
    is_dense_adapted = any("layers.1.mlp.gate_proj" in name for name in adapters(decoder))
    assert is_dense_adapted == (targets == ("gate_proj",))


def test_files_have_a_pair_for_each_expert_and_load_again() -> None:
    # Catches experts that change places in a file, and a file that fits only the run that wrote it.
    spec = AdapterSpec(rank=3, alpha=6.0, targets=TARGETS, alpha_pattern={"experts.down_proj": 2.0})
    decoder = decoder_of(spec, dtype=torch.float32)
    tensors = {key: tensor for group in adapter_tensors(decoder) for key, tensor in group.make().items()}
    shapes = {key: shape for group in adapter_tensors(decoder) for key, shape in group.shapes.items()}
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == shapes
    pair = adapters(decoder)[f"{LAYER}.up_proj"].pair
    key = f"base_model.model.{LAYER}.3.up_proj.lora_B.weight"
    assert torch.equal(tensors[key], pair.B.unflatten(0, (5, -1))[3])
    config = config_of(decoder, spec, base=None)
    layout = read_layout(config, InMemoryTensors(tensors))
    other = decoder_of(layout.spec, dtype=torch.float32)
    load_adapters(other, layout, InMemoryTensors(tensors))
    for name, parameter in adapter_parameters(decoder).items():
        assert torch.equal(adapter_parameters(other)[name], parameter)
    torch.testing.assert_close(logits(other), logits(decoder), rtol=0, atol=0)


@pytest.mark.parametrize("sharing", get_args(ExpertSharing))
def test_merging_repeatedly_keeps_what_was_learnt(sharing: ExpertSharing) -> None:
    # Catches a merge that leaves the adapter's part in the base twice, and a shared factor that stays as it was.
    decoder = decoder_of(shared_spec(sharing))
    before = logits(decoder)
    fold_(decoder)
    init_adapters(decoder, seed=0, generation=1)
    torch.testing.assert_close(logits(decoder), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sharing", get_args(ExpertSharing))
def test_dropout_is_drawn_in_training_only(sharing: ExpertSharing) -> None:
    # Catches an evaluation with noise, and an adapter whose dropout option is ignored.
    decoder = decoder_of(shared_spec(sharing, dropout=0.5)).eval()
    assert torch.equal(logits(decoder), logits(decoder_of(shared_spec(sharing)).eval()))
    decoder.train()
    assert not torch.equal(logits(decoder), logits(decoder))


def test_muon_sees_the_matrices_of_each_expert() -> None:
    # Catches all experts' factors that are orthogonalised as one matrix.
    decoder = decoder_of(AdapterSpec(rank=2, targets=("down_proj",)), dtype=torch.float32)
    matrices: Mapping[str, tuple[int, ...]] = decoder.layer_matrices()
    name = f"{LAYER}.adapter.down_proj"
    assert matrices[f"{name}.A"] == (2,) * 5
    assert matrices[f"{name}.B"] == (24,) * 5
    assert matrices["model.layers.1.mlp.down_proj.adapter.down_proj.A"] == (2,)
    logits(decoder).sum().backward()
    options = MuonOptions({key: rows for key, rows in matrices.items() if "adapter" in key})
    build_optimizer("muon", decoder.named_parameters(), lr=1e-3, weight_decay=0.0, muon=options).step()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"targets": ("experts.0.gate_proj",)}, "targets name some of the experts only"),
        ({"targets": ("experts.down_proj",), "use_dora": True}, "use_dora needs the norms .*0.mlp.experts.down_proj"),
        ({"targets": ("q_proj",), "expert_sharing": "all"}, "expert_sharing: the targets name no layer of experts"),
        ({"expert_sharing": "some"}, r"expert_sharing must be one of \('none', 'outer', 'all'\)"),
    ],
)
def test_what_does_not_work_is_refused(spec: dict, message: str) -> None:
    # Catches an adapter on one expert that trains all, norms of rows that were never computed, and an ignored option.
    with pytest.raises(ValueError, match=message):
        decoder_of(AdapterSpec(**spec))


def test_all_linear_leaves_experts_out() -> None:
    # Catches adapters that nobody asked for.
    assert not any("experts" in name for name in adapters(decoder_of(AdapterSpec(targets="all-linear"))))


def shared_spec(sharing: ExpertSharing, dropout: float = 0.0) -> AdapterSpec:
    spec = AdapterSpec(rank=3, alpha=5.0, targets=TARGETS, rank_pattern={"up_proj": 2}, use_rslora=True)
    return replace(spec, expert_sharing=sharing, dropout=dropout)


def plain_experts(mixture: MixtureOfExperts, factors: dict[str, tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    """The layer in plain torch, an expert at a time. factors: A and B by projection, [E or 1, ...], scaled."""
    probabilities = mixture.gate(x).softmax(-1)
    weights, ids = probabilities.topk(mixture.num_active)
    weights = weights / weights.sum(-1, keepdim=True)
    experts = mixture.experts
    gate_up, down = experts.gate_up_proj.stacked(x.dtype), experts.down_proj.stacked(x.dtype)
    out = torch.zeros_like(x)

    def adapted(x: Tensor, weight: Tensor, name: str, expert: int) -> Tensor:
        a, b = (factor[min(expert, len(factor) - 1)] for factor in factors[name])
        return F.linear(x, weight) + F.linear(F.linear(x, a), b)

    for expert in range(mixture.num_experts):
        tokens, choices = torch.where(ids == expert)
        gate, up = gate_up[expert].chunk(2)
        rows = x[tokens]
        inner = F.silu(adapted(rows, gate, "gate_proj", expert)) * adapted(rows, up, "up_proj", expert)
        y = adapted(inner, down[expert], "down_proj", expert)
        out = out.index_add(0, tokens, y * weights[tokens, choices, None])
    return out


def experts_pairs(decoder: Decoder) -> dict[str, ExpertLowRank]:
    experts = decoder.model.layers[0].mlp.experts
    return {pair.name.rpartition(".")[2]: pair for pair in experts.adapter.pairs()}


@pytest.mark.parametrize("sharing", SHARED)
def test_outputs_and_gradients_are_those_of_plain_torch(sharing: ExpertSharing) -> None:
    # Catches a factor that is not shared, one that counts once for each expert or choice, and a lost scale.
    decoder = decoder_of(shared_spec(sharing))
    mixture = decoder.model.layers[0].mlp
    x = torch.randn(23, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    layout = SequenceLayout.from_lengths([13, 10])
    leaves: dict[str, list[Tensor]] = {}
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for name, pair in experts_pairs(decoder).items():
        own = [pair.factor(leaf).detach().clone().requires_grad_(True) for leaf in "AB"]
        leaves[name] = own
        counts = [1 if leaf in LEAVES[sharing][name] else 5 for leaf in "AB"]
        a, b = (factor.unflatten(0, (count, -1)) for factor, count in zip(own, counts, strict=True))
        factors[name] = pair.scale * a, b
    grad = torch.randn(23, 24, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    inputs = [x.clone().requires_grad_(True) for _ in range(2)]
    found, _ = mixture(inputs[0], layout)
    expected = plain_experts(mixture, factors, inputs[1])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    found.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-8, atol=1e-8)
    for name, pair in experts_pairs(decoder).items():
        for leaf, twin in zip("AB", leaves[name], strict=True):
            mine = pair.factor(leaf).grad
            assert mine is not None
            assert (mine - twin.grad).norm() < 1e-5 * twin.grad.norm(), (name, leaf)


@pytest.mark.parametrize("sharing", SHARED)
def test_a_shared_factor_is_one_matrix(sharing: ExpertSharing) -> None:
    # Catches copies that drift apart, an initial value for each expert, and an optimizer that sees other matrices.
    decoder = decoder_of(None)
    names = {name for name, _ in decoder.named_parameters()}
    decoder = decoder_of(shared_spec(sharing), dtype=torch.float32)
    assert base_parameters(decoder).keys() == names
    matrices = decoder.layer_matrices()
    by_parameter = {parameter: name for name, parameter in decoder.named_parameters()}
    sizes = {"gate_proj": (24, 12), "up_proj": (24, 12), "down_proj": (12, 24)}
    init_adapters(decoder, seed=7)
    for name, pair in experts_pairs(decoder).items():
        rows = {"A": pair.rank, "B": sizes[name][1]}
        for leaf in "AB":
            count = 1 if leaf in LEAVES[sharing][name] else 5
            parameter = adapter_parameters(decoder)[f"{LAYER}.{name}.lora_{leaf}"]
            assert parameter is pair.factor(leaf)
            assert parameter.requires_grad
            assert len(parameter) == count * rows[leaf]
            assert matrices[by_parameter[parameter]] == (rows[leaf],) * count
    down = experts_pairs(decoder)["down_proj"].factor("A")
    assert 0 < down.abs().max() <= 12**-0.5
