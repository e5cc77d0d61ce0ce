"""config.json: what is read, what is refused by name, and that a config written is the config read."""

import logging
import re
from pathlib import Path

import pytest

import xorl.core.models
from xorl.core.models import SPECS, DecoderConfig, spec_for

SIZES: dict[str, object] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GPT2_SIZES: dict[str, object] = {"vocab_size": 100, "n_embd": 64, "n_layer": 4, "n_head": 8, "n_positions": 256}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
BANDED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(architecture: str, **changes: object) -> DecoderConfig:
    sizes = GPT2_SIZES if architecture == "GPT2LMHeadModel" else SIZES
    return spec_for({"architectures": [architecture]}).config_from_hf({**sizes, **changes})


@pytest.mark.parametrize("architectures", [None, [], ["BertModel"], "LlamaForCausalLM"])
def test_an_unknown_architecture_lists_the_known_ones(architectures):
    """Catches a KeyError, or a guess by model_type, for a model that is not there."""
    with pytest.raises(ValueError, match=r"ArceeForCausalLM, Cohere2ForCausalLM, .*, Starcoder2ForCausalLM$"):
        spec_for({"architectures": architectures})


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("LlamaForCausalLM", {"vocab_size": None}, "LlamaForCausalLM: the model's config.json has no 'vocab_size'"),
        ("LlamaForCausalLM", {"vocab_size": "100"}, "vocab_size must be of type int, got '100'"),
        ("LlamaForCausalLM", {"vocab_size": True}, "vocab_size must be of type int, got True"),
        ("LlamaForCausalLM", {"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, r"\(8\) must be a multiple of .* heads \(3\)"),
        ("LlamaForCausalLM", {"head_dim": 7}, "even head_dim, got 7"),
        ("LlamaForCausalLM", {"hidden_act": "mish"}, "hidden_act: 'mish' is not supported; supported: silu"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "longrope"}}, "rope_scaling: rope_type: 'longrope' is not supp"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "linear"}}, "rope_scaling: .* has no 'factor'"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {**YARN, "mrope_section": [1]}},
            r"mrope_section: \[1\] is not supported",
        ),
        ("LlamaForCausalLM", {"rope_parameters": 3}, "rope_parameters must be a mapping, got 3"),
        ("Qwen3ForCausalLM", {"rope_scaling": BANDED}, "rope_type: 'llama3' is not supported; supported: default"),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"]}, "number of layer_types: 1 is not supported"),
        ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "'sliding_attention' is not supported"),
        ("Qwen2ForCausalLM", {"layer_types": ["linear_attention"] * 4}, "'linear_attention' is not supported"),
        (
            "Qwen2ForCausalLM",
            {"use_mrope": True},
            "use_mrope: True is not supported: multi-dimensional positions are not implemented",
        ),
        ("GPT2LMHeadModel", {"n_head": 7}, "n_embd: 64 must be a multiple of n_head: 7"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention: True is not supported"),
        ("GPT2LMHeadModel", {"activation_function": "tanh"}, "activation_function: 'tanh' is not supported"),
    ],
)
def test_what_is_not_built_is_refused_by_key_and_value(architecture, changes, message):
    """Catches a config.json that asks for something and silently gets another model."""
    with pytest.raises(ValueError, match=message):
        read(architecture, **changes)


def test_rope_is_read_in_the_old_form_and_the_new():
    """Catches scaling or theta lost because config.json was written by another release."""
    old = read("LlamaForCausalLM", rope_theta=5e5, rope_scaling=BANDED)
    new = read("LlamaForCausalLM", rope_parameters={**BANDED, "rope_theta": 5e5})
    assert old == new
    [rope] = old.ropes
    assert (rope.theta, rope.kind, rope.trained_length) == (5e5, "banded", 64)
    assert read("LlamaForCausalLM", rope_scaling={"type": "default"}) == read("LlamaForCausalLM")


def test_windows_follow_layer_types_or_the_first_windowed_layer():
    """Catches a window on the wrong layers, and one that is switched off in config.json but applied."""
    on = {"use_sliding_window": True, "sliding_window": 16}
    assert read("Qwen3ForCausalLM", sliding_window=16, max_window_layers=2).windows == (None,) * 4
    assert read("Qwen3ForCausalLM", **on, max_window_layers=3).windows == (None, None, None, 16)
    assert read("Qwen3ForCausalLM", **on).windows == (None,) * 4
    layer_types = ["full_attention", "sliding_attention"] * 2
    assert read("Qwen3ForCausalLM", **on, layer_types=layer_types).windows == (None, 16, None, 16)


def test_dropout_and_unknown_keys_are_warned_of(caplog):
    """Catches a key that is silently ignored; dropout is the one that is known and not applied."""
    with caplog.at_level(logging.WARNING, logger="xorl.core.models.hf_config"):
        read("GPT2LMHeadModel", resid_pdrop=0.1, attn_pdrop=0.0, summary_type="cls_index", eos_token_id=3)
        read("LlamaForCausalLM", attention_multiplier=2.0, use_cache=True, unset=None)
    assert [record.getMessage() for record in caplog.records] == [
        "GPT2LMHeadModel: config.json sets dropout (resid_pdrop: 0.1), which is not applied: models "
        "train without dropout",
        "LlamaForCausalLM: config.json keys that are ignored: attention_multiplier",
    ]


def test_a_family_is_named_only_in_its_own_file():
    """Catches a branch on a family outside its file, where the next family would have to be added too."""
    folder = Path(xorl.core.models.__file__).parent
    families = {spec.model_type for spec in SPECS.values()}
    sources = [path for package in (folder, folder.parent / "nn") for path in package.glob("*.py")]
    for path in sources:
        if path == folder / "__init__.py":
            continue
        for family in (each for each in families if each not in path.stem and path.stem not in each):
            # Keys of a config.json may be named for the release of another family that they came from.
            named = re.search(rf"{family}(?!_?\d)", path.read_text(), re.IGNORECASE)
            assert not named, f"{path} names {family}"
