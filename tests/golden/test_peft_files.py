"""Adapter files against PEFT, both ways: what one wrote the other reads as what was meant."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_cases import make_twin
from tiny_models import ARCHITECTURES, hf_config
from xorl.ckpt import SafetensorsSource, export_hf, load_weights
from xorl.core.models import SPECS, Decoder
from xorl.kernels.layout import SequenceLayout
from xorl.lora import AdapterSpec, adapter_parameters, adapters, inject, peft
from xorl.lora.merge import merge_
from xorl.lora.peft.layout import ReplacedTensors
from xorl.train.export.rest import in_stacks


def qwen3() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config.from_dict(hf_config())).eval()


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config.from_dict(hf_config("gpt2", bos_token_id=0, eos_token_id=0))).eval()


def write_adapter(model: PreTrainedModel, folder: Path, **options: object) -> nn.Module:
    """A PEFT model whose adapters change something, saved to `folder`."""
    adapted = get_peft_model(model, LoraConfig(lora_alpha=6, **options))
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad and "lora_magnitude" not in name:
            nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(folder)
    return adapted


CASES = {
    "lora": (qwen3, {"r": 4, "target_modules": ["q_proj", "down_proj"]}),
    "rslora": (qwen3, {"r": 4, "target_modules": ["v_proj"], "use_rslora": True}),
    "dora": (qwen3, {"r": 4, "target_modules": "all-linear", "use_dora": True}),
    "patterns": (
        qwen3,
        {
            "r": 4,
            "target_modules": r".*\.(q|k)_proj",
            "rank_pattern": {"layers.0.self_attn.q_proj": 2, r".*k_proj": 3},
            "alpha_pattern": {"k_proj": 12},
        },
    ),
    "embeddings": (qwen3, {"r": 4, "target_modules": ["embed_tokens", "lm_head"], "modules_to_save": ["norm"]}),
    "dora embeddings": (qwen3, {"r": 4, "target_modules": ["embed_tokens"], "use_dora": True}),
    "modules to save": (qwen3, {"r": 2, "target_modules": ["o_proj"], "modules_to_save": ["lm_head", "mlp"]}),
    "some layers": (qwen3, {"r": 2, "target_modules": ["o_proj"], "layers_to_transform": [1]}),
    "transposed": (gpt2, {"r": 4, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "transposed dora": (gpt2, {"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_merged_rows_of_a_file_that_peft_wrote_are_those_that_peft_merges(case: str, tmp_path: Path) -> None:
    # Catches a scale, a pattern, a magnitude or an orientation that is read as another one than PEFT's.
    make, options = CASES[case]
    base = {name: tensor.clone() for name, tensor in make().state_dict().items()}
    adapted = write_adapter(make(), tmp_path, **options)
    merged = {name: tensor for name, tensor in adapted.merge_and_unload().state_dict().items() if name in base}
    config = peft.AdapterConfig.from_json(json.loads((tmp_path / peft.CONFIG_FILE).read_text()))
    with SafetensorsSource(tmp_path, single_file=peft.WEIGHTS_FILE) as source:
        layout = peft.read_layout(config, source)
        assert peft.differences(layout, {name: tensor.shape for name, tensor in base.items()}) == []
        weights = peft.MergedWeights.of_file(peft.InMemoryTensors(base), layout, source)
        changed = 0
        for name, wanted in merged.items():
            num_rows = wanted.shape[0]
            pieces = [weights.read(name, 0, 5), weights.read(name, 5, num_rows)]
            for read in (torch.cat(pieces), weights.read(name)):
                assert (read - wanted).abs().max() <= 2e-6, name
            changed += not torch.equal(wanted, base[name])
        assert changed >= len(layout.modules)


@pytest.mark.parametrize("case", ["rslora", "dora", "patterns", "embeddings", "modules to save"])
@pytest.mark.filterwarnings("ignore")
def test_folders_pass_to_and_fro_on_a_model_of_transformers(case: str, tmp_path: Path) -> None:
    # Catches a head trained whole that is in one of the two files only, or that the reader leaves out.
    make, options = CASES[case]
    theirs = write_adapter(make(), tmp_path / "theirs", **options).eval()
    wanted = theirs(IDS).logits
    own = make()
    spec = peft.load_adapter(own, tmp_path / "theirs")
    assert (own(IDS).logits - wanted).abs().max() <= 1e-5
    peft.save_adapter(own, spec, tmp_path / "own", base="org/base")
    again = PeftModel.from_pretrained(make(), tmp_path / "own").eval()
    assert (again(IDS).logits - wanted).abs().max() <= 1e-5


def write_ours(
    decoder: Decoder, spec: AdapterSpec, folder: Path, transposed: Collection[str], more: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of an adapter folder that xorl writes."""
    made = [tensors.make() for tensors in peft.adapter_tensors(decoder)]
    tensors = {key: tensor.contiguous() for group in made for key, tensor in group.items()} | more
    written = peft.config_of(decoder, spec, base=None, transposed=transposed)
    folder.mkdir()
    (folder / peft.CONFIG_FILE).write_text(json.dumps(written.to_json()))
    save_file(tensors, folder / peft.WEIGHTS_FILE, metadata={"format": "pt"})
    return tensors


def logits_of(decoder: Decoder) -> Tensor:
    return decoder(IDS[0], SequenceLayout.from_lengths([IDS.shape[1]]))


IDS = torch.arange(40, 52)[None]
# What is in both: PEFT's copies of an embedding's own weight are not written, and are read.
EXCHANGED = [case for case in CASES if case not in ("modules to save", "dora embeddings")]


@pytest.mark.parametrize("case", EXCHANGED)
@pytest.mark.filterwarnings("ignore")
def test_adapters_pass_to_and_fro(case: str, tmp_path: Path) -> None:
    # Catches a key that one of us does not know, and an adapter that computes something else on the other side.
    make, options = CASES[case]
    theirs = write_adapter(make(), tmp_path / "theirs", **options).eval()
    config = peft.AdapterConfig.from_json(json.loads((tmp_path / "theirs" / peft.CONFIG_FILE).read_text()))
    decoder, recipes = make_twin(make())
    with SafetensorsSource(tmp_path / "theirs", single_file=peft.WEIGHTS_FILE) as source:
        layout = peft.read_layout(config, source)
        inject(decoder, layout.spec)
        peft.load_adapters(decoder, layout, source, base_loaded=True)
        brought = {name: key for name, key in layout.replaced.items() if "base_layer" not in key}
        own = dict(decoder.named_parameters())
        load_weights(
            {name: own[name] for name in brought},
            {name: recipe for name, recipe in recipes.items() if name in brought},
            ReplacedTensors(layout, source),
            mode="all_ranks",
            ignore=lambda name: name not in brought,
        )
    with torch.no_grad():
        wanted = theirs(IDS).logits[0]
        assert (logits_of(decoder) - wanted).abs().max() <= 1e-5

        transposed = [name for name in layout.modules if config.fan_in_fan_out]
        more = {key: own[name].data for name, key in brought.items()}
        tensors = write_ours(decoder, layout.spec, tmp_path / "ours", transposed, more)
        again = get_peft_model(make(), PeftConfig.from_pretrained(tmp_path / "ours"))
        assert tensors.keys() == get_peft_model_state_dict(again, save_embedding_layers=False).keys()
        outcome = again.load_adapter(tmp_path / "ours", "default")
        assert not outcome.unexpected_keys
        assert not [key for key in outcome.missing_keys if "lora_" in key or "modules_to_save" in key]
        assert (again.eval()(IDS).logits[0] - wanted).abs().max() <= 1e-5


def tiny(model_type: str) -> PreTrainedModel:
    """A model of transformers of any family."""
    torch.manual_seed(0)
    values = hf_config(model_type, bos_token_id=0, eos_token_id=0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type].from_dict(values)).eval()


# Targets that a family has with another configuration: queries without latents, and delta nets in other files.
OF_OTHER_CONFIGS = {"q_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "in_proj_qkvz", "in_proj_ba"}


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore")
def test_default_adapters_of_every_family_are_the_same_in_peft_and_merged(model_type: str, tmp_path: Path) -> None:
    # Catches targets that a family does not have in its files, and adapters on parts of a matrix that its files stack.
    family = SPECS[ARCHITECTURES[model_type]]
    decoder, recipes = make_twin(tiny(model_type))
    spec = AdapterSpec(rank=4, alpha=6.0, targets=family.default_targets(decoder.config))
    assert set(family.adapter_targets) - set(spec.targets) <= OF_OTHER_CONFIGS
    inject(decoder, spec)
    with torch.no_grad():
        base = logits_of(decoder)
        for parameter in adapter_parameters(decoder).values():
            nn.init.normal_(parameter, std=0.3)
        wanted = logits_of(decoder)
        tolerance = 1e-5 * wanted.abs().max()
        assert (wanted - base).abs().max() > 1e3 * tolerance
        members = [name for adapter in adapters(decoder).values() for name in adapter.members]
        write_ours(decoder, spec, tmp_path / "ours", members if model_type == "gpt2" else (), {})
        theirs = PeftModel.from_pretrained(tiny(model_type), tmp_path / "ours").eval()
        assert (theirs(IDS).logits[0] - wanted).abs().max() <= tolerance
        merge_(decoder)
        arrange = partial(in_stacks, experts=family.checkpoint_names.experts)
        options = {"hf_config": hf_config(model_type), "arrange": arrange}
        export_hf(dict(decoder.named_parameters()), recipes, tmp_path / "merged", **options)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert (merged(IDS).logits[0] - wanted).abs().max() <= tolerance
