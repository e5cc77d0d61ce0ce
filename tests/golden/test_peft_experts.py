"""Adapters on experts against PEFT, whose `target_parameters` adapt the stacked weights: files both ways, gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_cases import make_twin
from tiny_models import BESIDE, hf_config
from xorl.core.models import SPECS, Decoder
from xorl.kernels.layout import SequenceLayout
from xorl.lora import AdapterSpec, adapter_parameters, inject
from xorl.lora import adapters as injected
from xorl.lora.peft import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterConfig,
    InMemoryTensors,
    adapter_tensors,
    config_of,
    load_adapters,
    per_expert,
    read_layout,
    save_adapter,
)
from xorl.lora.peft.config import ExpertForm
from xorl.lora.peft.forms import Reader, readers_of
from xorl.lora.spec import ExpertSharing

IDS = torch.arange(40, 60)[None]
SHARED: tuple[ExpertSharing, ...] = get_args(ExpertSharing)
# By model type: the architecture, and the names of gate, up and down in checkpoints.
MODELS = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("MixtralForCausalLM", ("w1", "w3", "w2")),
    "minimax_m2": ("MiniMaxM2ForCausalLM", ("w1", "w3", "w2")),
    "gpt_oss": ("GptOssForCausalLM", ("gate_proj", "up_proj", "down_proj")),
    "gemma4_text": ("Gemma4ForCausalLM", ("experts.gate_proj", "experts.up_proj", "experts.down_proj")),
}
CHANGES = {"gemma4_text": BESIDE}
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TOLERANCE = 1e-5


def model_of(model_type: str, **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = hf_config(model_type, **CHANGES.get(model_type, {}), **changes)
    config = AutoConfig.for_model(**{**shape, "experts_implementation": "eager"})
    return AutoModelForCausalLM.from_config(config).eval()


def decoder_of(model: PreTrainedModel) -> Decoder:
    """xorl's decoder with the same weights."""
    return make_twin(model)[0]


def load(decoder: Decoder, folder: Path, model_type: str) -> AdapterSpec:
    """Add the adapter in a folder to a decoder."""
    names = SPECS[MODELS[model_type][0]].checkpoint_names.experts
    config = AdapterConfig.from_json(json.loads((folder / CONFIG_FILE).read_text()))
    config, source = per_expert(config, InMemoryTensors(load_file(folder / WEIGHTS_FILE)), names)
    layout = read_layout(config, source)
    inject(decoder, layout.spec)
    load_adapters(decoder, layout, source)
    return layout.spec


def logits_of(decoder: Decoder) -> Tensor:
    return decoder(IDS[0], SequenceLayout.from_lengths([IDS.shape[1]]))


def draw(parameters: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters:
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("sharing", SHARED)
@pytest.mark.parametrize("projections", [(0, 1, 2), (1,), (2,)])
@pytest.mark.filterwarnings("ignore")
def test_peft_computes_what_we_wrote(
    projections: tuple[int, ...], sharing: ExpertSharing, model_type: str, tmp_path: Path
) -> None:
    # Catches experts in another order, gate and up that change places, and a scale that the doubled rank changes.
    decoder = decoder_of(model_of(model_type))
    targets = tuple(MODELS[model_type][1][index] for index in projections)
    spec = AdapterSpec(rank=3, alpha=5.0, targets=("q_proj", *targets), expert_sharing=sharing, use_rslora=True)
    inject(decoder, spec)
    draw(list(adapter_parameters(decoder).values()))
    config = config_of(decoder, spec, base=None, form="peft")
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config.to_json()))
    tensors = {key: one for group in adapter_tensors(decoder, form="peft") for key, one in group.make().items()}
    save_file(tensors, tmp_path / WEIGHTS_FILE, metadata={"format": "pt"})
    theirs = get_peft_model(model_of(model_type), PeftConfig.from_pretrained(tmp_path))
    assert tensors.keys() == get_peft_model_state_dict(theirs).keys()
    outcome = theirs.load_adapter(tmp_path, "default")
    assert not outcome.unexpected_keys
    assert not [key for key in outcome.missing_keys if "lora_" in key]
    with torch.no_grad():
        expected = logits_of(decoder)
        assert (logits_of(decoder_of(model_of(model_type))) - expected).abs().max() > 100 * TOLERANCE
        assert (theirs.eval()(IDS).logits[0] - expected).abs().max() <= TOLERANCE * expected.abs().max()
        again = decoder_of(model_of(model_type))
        assert load(again, tmp_path, model_type).expert_sharing == sharing
        assert torch.equal(logits_of(again), expected)


# Changes of config.json, the adapters, their form, and who is said to read them.
PROMISES: dict[str, tuple[dict[str, object], dict[str, object], ExpertForm | None, tuple[Reader, ...]]] = {
    "attention": ({}, {"targets": ("q_proj",)}, None, ("peft",)),
    "experts": ({}, {}, None, ("vllm", "sglang")),
    "experts, rsLoRA": ({}, {"use_rslora": True}, None, ("vllm",)),
    "experts, up alone scaled": ({}, {"alpha_pattern": {"up_proj": 2.0}}, None, ()),
    "experts, a norm whole": ({}, {"modules_to_save": ("model.norm",)}, None, ()),
    "experts, peft": ({}, {}, "peft", ("peft",)),
    "experts, peft, down of its own": (
        *({}, {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"down_proj": 9.0}, "use_rslora": True}),
        *("peft", ("peft",)),
    ),
    "experts, peft, a norm whole": ({}, {"modules_to_save": ("model.norm",)}, "peft", ("peft",)),
    "dense layers": ({"mlp_only_layers": [0]}, {"targets": "all-linear"}, None, ("vllm", "sglang")),
    "dense layers, attention": ({"mlp_only_layers": [0]}, {"targets": ("q_proj", "o_proj")}, None, ("peft",)),
    "experts, dense layers": ({"mlp_only_layers": [0]}, {}, None, ("vllm", "sglang")),
}


@pytest.mark.parametrize("name", PROMISES)
@pytest.mark.filterwarnings("ignore")
def test_peft_computes_what_is_promised_to_it(name: str, tmp_path: Path) -> None:
    """Catches a file that is said to be for PEFT, which drops a part of it or scales it otherwise, often unsaid."""
    changes, adapters, form, readers = PROMISES[name]
    decoder = decoder_of(model_of("qwen3_moe", **changes))
    defaults = {"rank": 4, "alpha": 6.0, "targets": ("q_proj", "gate_proj", "up_proj", "down_proj")}
    spec = AdapterSpec(**{**defaults, **adapters})
    inject(decoder, spec)
    draw(list(adapter_parameters(decoder).values()))
    save_adapter(decoder, spec, tmp_path, form=form)
    config = config_of(decoder, spec, base=None, form=form)
    modules = [each for adapter in injected(decoder).values() for each in adapter.members]
    assert readers_of(config, modules, is_mixture=True) == readers
    if "peft" not in readers:
        return
    theirs = PeftModel.from_pretrained(model_of("qwen3_moe", **changes), tmp_path).eval()
    with torch.no_grad():
        expected = logits_of(decoder)
        assert (logits_of(decoder_of(model_of("qwen3_moe", **changes))) - expected).abs().max() > 100 * TOLERANCE
        assert (theirs(IDS).logits[0] - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("parameters", [PARAMETERS, PARAMETERS[:1], PARAMETERS[1:]])
@pytest.mark.filterwarnings("ignore")
def test_we_compute_what_peft_wrote(parameters: list[str], model_type: str, tmp_path: Path) -> None:
    # Catches a pattern of PEFT's parameters that is not ours, and the other projection where there is only one.
    options = {"rank_pattern": {"experts.gate_up_proj": 6}, "alpha_pattern": {r".*down_proj": 9}}
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"], target_parameters=parameters, **options)
    theirs = get_peft_model(model_of(model_type), config)
    draw([one for one in theirs.parameters() if one.requires_grad])
    theirs.save_pretrained(tmp_path)
    decoder = decoder_of(model_of(model_type))
    load(decoder, tmp_path, model_type)
    with torch.no_grad():
        expected = theirs.eval()(IDS).logits[0]
        assert (logits_of(decoder) - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("sharing", SHARED)
@pytest.mark.filterwarnings("ignore")
def test_gradients_are_those_of_peft(sharing: ExpertSharing, tmp_path: Path) -> None:
    # Catches a factor of all experts whose gradient is that of some, and gradients that are scaled twice.
    rank, names = 4, MODELS["qwen3_moe"][1]
    config = LoraConfig(r=2 * rank, lora_alpha=12, target_modules=[], target_parameters=PARAMETERS)
    theirs = get_peft_model(model_of("qwen3_moe"), config).eval()
    decoder = decoder_of(model_of("qwen3_moe"))
    # Of rank 2r like PEFT's, so that PEFT can express them: gate and up use different halves.
    spec = AdapterSpec(
        rank=rank,
        alpha=6.0,
        targets=names,
        expert_sharing=sharing,
        rank_pattern={names[2]: 2 * rank},
        alpha_pattern={names[2]: 12.0},
    )
    inject(decoder, spec)
    draw(list(adapter_parameters(decoder).values()))
    written = {key: one for group in adapter_tensors(decoder, form="peft") for key, one in group.make().items()}
    for key, parameter in theirs.named_parameters():
        if "lora_" in key:
            parameter.data = written[key.replace(".default", "")].clone()
    logits_of(decoder).square().mean().backward()
    theirs(IDS).logits[0].square().mean().backward()
    grads = {key.replace(".default", ""): one.grad for key, one in theirs.named_parameters() if one.grad is not None}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        a, b = (grads[f"base_model.model.{prefix}.base_layer.lora_{leaf}.weight"] for leaf in "AB")
        num_experts = a.shape[0] // (2 * rank)
        a = a.view(num_experts, 2, rank, -1)
        b = b.view(2, -1, 2, rank, num_experts).permute(4, 0, 1, 2, 3)  # [E, gate or up, F, half of the rank, rank]
        down_a, down_b = (grads[f"base_model.model.{prefix}.lora_{leaf}.weight"] for leaf in "AB")
        down_b = down_b.view(len(down_b), -1, num_experts).permute(2, 0, 1)
        expected = {
            names[0]: (a[:, 0], b[:, 0, :, 0]),
            names[1]: (a[:, 1], b[:, 1, :, 1]),
            names[2]: (down_a.view(num_experts, 2 * rank, -1), down_b),
        }
        for name, factors in expected.items():
            for leaf, factor in zip("AB", factors, strict=True):
                found = adapter_parameters(decoder)[f"{prefix}.{name}.lora_{leaf}"].grad
                assert found is not None
                of_all = factor.sum(0) if len(found) == factor.shape[1] else factor.flatten(0, 1)
                assert (found - of_all).norm() <= TOLERANCE * of_all.norm(), (name, leaf)


def test_who_reads_adapters_on_stacked_experts(tmp_path: Path) -> None:
    # Catches a promise to programs that have no name for one expert of a family whose checkpoints stack them.
    decoder = decoder_of(model_of("gpt_oss"))
    spec = AdapterSpec(rank=4, alpha=6.0, targets=("gate_proj", "up_proj", "down_proj"), expert_sharing="outer")
    inject(decoder, spec)
    modules = [each for adapter in injected(decoder).values() for each in adapter.members]
    forms: dict[ExpertForm | None, tuple[Reader, ...]] = {None: (), "per_expert": (), "peft": ("peft",)}
    for form, readers in forms.items():
        config = config_of(decoder, spec, base=None, form=form)
        assert readers_of(config, modules, is_mixture=True, is_stacked=True) == readers
    with pytest.raises(ValueError, match="form: SGLang has none for adapters on experts that checkpoints stack"):
        save_adapter(decoder, spec, tmp_path, form="sglang")
