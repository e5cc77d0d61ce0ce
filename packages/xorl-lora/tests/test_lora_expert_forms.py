"""The forms of adapters on experts in files: names, orders, what a file returns as, and what a form cannot express."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from tiny_decoders import tiny_decoder
from tiny_models import hf_config
from xorl.core.models import Decoder
from xorl.core.models.mixtral import EXPERT_NAMES
from xorl.kernels.layout import SequenceLayout
from xorl.lora import AdapterSpec, adapter_parameters, inject, peft
from xorl.lora.peft.config import ExpertForm
from xorl.lora.peft.layout import AdapterLayout
from xorl.lora.spec import ExpertSharing

E, D, F = 3, 16, 8
SIZES = {"vocab_size": 40, "hidden_size": D, "num_attention_heads": 2, "num_key_value_heads": 1}
SHAPES: dict[str, dict[str, object]] = {
    "Qwen3MoeForCausalLM": hf_config("qwen3_moe", **SIZES, moe_intermediate_size=F, num_experts=E),
    "MixtralForCausalLM": hf_config("mixtral", **SIZES, intermediate_size=F, num_local_experts=E),
}
TARGETS = {
    "Qwen3MoeForCausalLM": ("q_proj", "gate_proj", "up_proj", "down_proj"),
    "MixtralForCausalLM": ("q_proj", "w1", "w3", "w2"),
}
QWEN, MIXTRAL = TARGETS
FORMS: list[tuple[ExpertForm, ExpertSharing]] = [
    ("per_expert", "none"),
    ("per_expert", "outer"),
    ("per_expert", "all"),
    ("peft", "none"),
    ("peft", "outer"),
    ("peft", "all"),
    ("sglang", "outer"),
]
EXPERTS = "base_model.model.model.layers.1.mlp.experts"


def decoder_of(spec: AdapterSpec | None, architecture: str = QWEN) -> Decoder:
    """With adapters that are not zero."""
    decoder = tiny_decoder(SHAPES[architecture])
    if spec is not None:
        inject(decoder, spec)
        generator = torch.Generator().manual_seed(2)
        for parameter in adapter_parameters(decoder).values():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return decoder


def spec_of(sharing: ExpertSharing = "none", architecture: str = QWEN) -> AdapterSpec:
    return AdapterSpec(rank=4, alpha=6.0, targets=TARGETS[architecture], expert_sharing=sharing)


def written(
    decoder: Decoder, spec: AdapterSpec, form: ExpertForm | None
) -> tuple[dict[str, object], dict[str, Tensor]]:
    """The content of the two files."""
    config = peft.config_of(decoder, spec, base=None, form=form)
    groups = peft.adapter_tensors(decoder, form=config.form)
    tensors = {key: tensor for group in groups for key, tensor in group.make().items()}
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == {
        key: tuple(shape) for group in groups for key, shape in group.shapes.items()
    }
    return json.loads(json.dumps(config.to_json())), tensors


def read(
    content: dict[str, object], tensors: dict[str, Tensor], architecture: str = QWEN
) -> tuple[AdapterLayout, object]:
    names = EXPERT_NAMES if architecture == MIXTRAL else None
    config, source = peft.per_expert(peft.AdapterConfig.from_json(content), peft.InMemoryTensors(tensors), names)
    return peft.read_layout(config, source), source


def logits(decoder: Decoder) -> Tensor:
    return decoder(torch.arange(30) * 7 % 40, SequenceLayout.from_lengths([13, 17]))


@pytest.mark.parametrize("architecture", TARGETS)
@pytest.mark.parametrize(("form", "sharing"), FORMS)
def test_every_form_returns_what_was_written(form: ExpertForm, sharing: ExpertSharing, architecture: str) -> None:
    # Catches experts that change places, gate and up that do, a lost scale, and copies that are trained separately.
    spec = spec_of(sharing, architecture)
    decoder = decoder_of(spec, architecture)
    layout, source = read(*written(decoder, spec, form), architecture)
    assert layout.config.form == form
    assert layout.spec.expert_sharing == sharing
    other = decoder_of(layout.spec, architecture)
    peft.load_adapters(other, layout, source)
    found, expected = adapter_parameters(other), adapter_parameters(decoder)
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter), name
    torch.testing.assert_close(logits(other), logits(decoder), rtol=0, atol=0)
    assert len(layout.modules) == 2 * (1 + 3 * E)


def test_a_spec_of_other_sharing_is_not_saved(tmp_path: Path) -> None:
    # Catches a folder that cannot be loaded, because its settings describe other factors than its tensors.
    decoder = decoder_of(spec_of("none", QWEN), QWEN)
    for sharing in ("outer", "all"):
        with pytest.raises(
            ValueError, match=f"spec: expert_sharing is '{sharing}', but that of the adapter on .*'none'"
        ):
            peft.save_adapter(decoder, spec_of(sharing, QWEN), tmp_path)
    for written_in in (
        peft.adapter_tensors,
        partial(peft.in_form, *read(*written(decoder, spec_of("none", QWEN), "peft"))),
    ):
        with pytest.raises(ValueError, match="form: 'zz' is not one of"):
            written_in(form="zz", **({"model": decoder} if written_in is peft.adapter_tensors else {}))


@pytest.mark.parametrize("architecture", TARGETS)
@pytest.mark.parametrize("form", get_args(ExpertForm))
def test_folders_hold_every_form(form: ExpertForm, architecture: str, tmp_path: Path) -> None:
    # Catches a form that the folder's configuration and its tensors do not share.
    spec = replace(spec_of("outer", architecture), modules_to_save=("model.norm",))
    decoder = decoder_of(spec, architecture)
    decoder.model.norm.weight.data += 1
    peft.save_adapter(decoder, spec, tmp_path, form=form)
    other = decoder_of(None, architecture)
    peft.load_adapter(other, tmp_path, expert_names=EXPERT_NAMES if architecture == MIXTRAL else None)
    torch.testing.assert_close(logits(other), logits(decoder), rtol=0, atol=0)


@pytest.mark.parametrize(("form", "sharing"), FORMS)
def test_a_file_merges_into_the_weights_that_the_model_computes_with(form: ExpertForm, sharing: ExpertSharing) -> None:
    # Catches a merge of a file that reads another expert's rows than the model.
    decoder = decoder_of(spec_of(sharing))
    layout, source = read(*written(decoder, spec_of(sharing), form))
    base = {
        f"{name}.weight": torch.zeros(module.out_features, module.in_features)
        for name, module in layout.modules.items()
    }
    merged = peft.MergedWeights.of_file(peft.InMemoryTensors(base), layout, source)
    for expert in range(E):
        for leaf in TARGETS[QWEN][1:]:
            parameters = adapter_parameters(decoder)
            a, b = (parameters[f"model.layers.1.mlp.experts.{leaf}.lora_{one}"] for one in "AB")
            a, b = a.view(-1, 4, a.shape[1]), b.view(-1, D if leaf == "down_proj" else F, 4)
            expected = 1.5 * b[min(expert, len(b) - 1)] @ a[min(expert, len(a) - 1)]
            found = merged.read(f"model.layers.1.mlp.experts.{expert}.{leaf}.weight")
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"base: the adapter does not fit: .*: the base does not have this layer"):
        peft.MergedWeights.of_file(peft.InMemoryTensors({"norm.weight": torch.zeros(D)}), layout, source)


@pytest.mark.parametrize("to", [form for form in FORMS if form[1] == "outer"])
@pytest.mark.parametrize("form", get_args(ExpertForm))
def test_forms_are_converted(form: ExpertForm, to: tuple[ExpertForm, ExpertSharing]) -> None:
    # Catches an export in another form that loses the sharing, or repeats what was one.
    spec = spec_of("outer")
    decoder = decoder_of(spec)
    config, groups = peft.in_form(*read(*written(decoder, spec, form)), to[0])
    tensors = {key: tensor for group in groups for key, tensor in group.make().items()}
    expected, directly = written(decoder, spec, to[0])
    assert config.to_json() == expected
    assert tensors.keys() == directly.keys()
    for key, tensor in directly.items():
        assert torch.equal(tensors[key], tensor), key


def test_names_and_orders_are_those_of_peft_and_sglang() -> None:
    # Catches a file that only its writer reads, such as one with B's columns in the order of the experts.
    decoder = decoder_of(spec_of())
    content, tensors = written(decoder, spec_of(), "peft")
    parameters = {
        name.removeprefix("model.layers.1.mlp.experts."): parameter
        for name, parameter in adapter_parameters(decoder).items()
        if name.startswith("model.layers.1.mlp.experts.")
    }
    assert content["target_modules"] == ["q_proj"]
    names = [f"model.layers.{layer}.mlp.experts.{name}" for layer in range(2) for name in ("down_proj", "gate_up_proj")]
    assert content["target_parameters"] == names
    assert (content["r"], content["lora_alpha"]) == (4, 6.0)
    assert (content["rank_pattern"], content["alpha_pattern"]) == ({"gate_up_proj": 8}, {"gate_up_proj": 12.0})
    assert {key for key in tensors if key.startswith(EXPERTS)} == {
        f"{EXPERTS}{wrapper}.lora_{leaf}.weight" for wrapper in ("", ".base_layer") for leaf in "AB"
    }
    a, b = (tensors[f"{EXPERTS}.lora_{leaf}.weight"] for leaf in "AB")
    assert torch.equal(a, parameters["down_proj.lora_A"])
    assert torch.equal(b.view(D, 4, E)[:, :, 2], parameters["down_proj.lora_B"].view(E, D, 4)[2])
    b = tensors[f"{EXPERTS}.base_layer.lora_B.weight"].view(2 * F, 8, E)[:, :, 1]
    assert torch.equal(b[F:, 4:], parameters["up_proj.lora_B"].view(E, F, 4)[1])
    assert not b[F:, :4].any()
    assert not b[:F, 4:].any()

    shared = decoder_of(spec_of("outer"))
    content, tensors = written(shared, spec_of("outer"), None)
    assert content["_sglang_lora_format"] == "shared_outer"
    assert content["moe_hybrid_shared_lora"] is True
    assert {key.removeprefix(f"{EXPERTS}."): tuple(tensors[key].shape) for key in tensors if "1.mlp" in key} == {
        **{f"{name}.lora_A.weight": (1, 4, D) for name in ("w1", "w3")},
        **{f"{name}.lora_B.weight": (E, F, 4) for name in ("w1", "w3")},
        "w2.lora_A.weight": (E, 4, F),
        "w2.lora_B.weight": (1, D, 4),
    }


@pytest.mark.parametrize("targets", [("gate_proj",), ("up_proj", "q_proj"), ("down_proj",), ("gate_proj", "up_proj")])
def test_some_projections_alone_in_the_form_of_peft(targets: tuple[str, ...]) -> None:
    # Catches the name of the inner wrapper where there is only one, and an adapter that gets the other's rows.
    spec = replace(spec_of(), targets=targets)
    decoder = decoder_of(spec)
    content, tensors = written(decoder, spec, "peft")
    assert not [key for key in tensors if "base_layer" in key]
    layout, source = read(content, tensors)
    other = decoder_of(layout.spec)
    peft.load_adapters(other, layout, source)
    assert adapter_parameters(other).keys() == adapter_parameters(decoder).keys()
    torch.testing.assert_close(logits(other), logits(decoder), rtol=0, atol=0)


def test_stacks_without_a_mark_are_told_by_their_shapes() -> None:
    # Catches a file of another program that is refused, or read as if its experts shared what they do not.
    tensors = {
        f"{EXPERTS}.{name}.lora_{leaf}.weight": torch.randn(E, *shape)
        for name, outputs, inputs in (("gate_proj", F, D), ("w3", F, D), ("w2", D, F))
        for leaf, shape in (("A", (4, inputs)), ("B", (outputs, 4)))
    }
    content: dict[str, object] = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["gate_proj"]}
    layout, source = read(content, tensors)
    assert layout.spec.expert_sharing == "none"
    found = source.read(f"{EXPERTS}.2.down_proj.lora_B.weight")
    assert torch.equal(found, tensors[f"{EXPERTS}.w2.lora_B.weight"][2])
    tensors[f"{EXPERTS}.w2.lora_A.weight"] = torch.randn(1, 4, F)
    with pytest.raises(ValueError, match="only A of gate and up and B of down can be shared alone"):
        read(content, tensors)


@pytest.mark.parametrize(
    ("changes", "form", "message"),
    [
        ({}, "sglang", "these share nothing"),
        ({"expert_sharing": "all"}, "sglang", "these share all factors"),
        ({"expert_sharing": "outer", "use_rslora": True}, None, r"alpha / rank, not by use_rslora"),
        ({"expert_sharing": "outer", "rank_pattern": {"q_proj": 2}}, None, "reads one rank and alpha for all layers"),
        ({"alpha_pattern": {"up_proj": 2.0}}, "peft", r"one adapter for gate and up .* scales are 1.5 and 0.5"),
        ({"targets": ("q_proj",)}, "peft", "only adapters on experts have forms"),
        ({"rank_pattern": {"down_proj": 2}}, None, "vLLM and SGLang read one rank and alpha .*: use peft"),
        ({"alpha_pattern": {"q_proj": 2.0}}, "per_expert", "vLLM and SGLang read one rank and alpha .*: use peft"),
    ],
)
def test_what_a_form_cannot_express_is_refused(
    changes: dict[str, object], form: ExpertForm | None, message: str
) -> None:
    # Catches a file that loads and computes something else.
    spec = replace(spec_of(), **changes)
    with pytest.raises(ValueError, match=f"form: .*{message}"):
        peft.config_of(decoder_of(spec), spec, base=None, form=form)


def test_files_that_are_of_no_form_are_refused() -> None:
    # Catches copies of a shared factor that differ, and a parameter that is not of experts.
    spec = spec_of("all")
    content, tensors = written(decoder_of(spec), spec, None)
    layout, source = read(content, tensors)
    tensors[f"{EXPERTS}.1.up_proj.lora_A.weight"] = torch.zeros(4, D)
    with pytest.raises(ValueError, match=r"experts.1.up_proj: lora_A differs from that of .*experts.0.up_proj"):
        peft.load_adapters(decoder_of(layout.spec), layout, source)
    content, tensors = written(decoder_of(spec_of()), spec_of(), "peft")
    with pytest.raises(ValueError, match=r"is no multiple of the rank 5"):
        read({key: value for key, value in content.items() if key != "xorl"} | {"rank_pattern": {}, "r": 5}, tensors)
    with pytest.raises(ValueError, match=r"gate_up_ranks of model.layers.0 do not add up to the rank 8"):
        read({**content, "xorl": {**content["xorl"], "gate_up_ranks": {}}}, tensors)
    with pytest.raises(ValueError, match="_sglang_lora_format is 'other'"):
        peft.AdapterConfig.from_json({"peft_type": "LORA", "_sglang_lora_format": "other"})
