"""What an adapter file may say, and what is said of one that is another's or not whole."""

from __future__ import annotations

import json

import pytest
import torch

from xorl.lora import AdapterSpec
from xorl.lora.peft import AdapterConfig, InMemoryTensors, differences, read_layout
from xorl.lora.peft.config import shared_value, shortest_names
from xorl.lora.peft.layout import keys_of
from xorl.lora.peft.merged import AdapterValues, fold

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


def held(shapes):
    return InMemoryTensors({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})


def shapes(module="layers.0.q_proj", a=(2, 8), b=(4, 2), **others):
    a_key, b_key, _ = keys_of(module)
    return held({a_key: a, b_key: b} | {key.replace("__", "."): shape for key, shape in others.items()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": 0}, "rank must be at least 1, got 0"),
        ({"lora_alpha": 0}, "alpha must be a finite number above 0"),
        ({"rank_pattern": {"k_proj": 0}}, "k_proj.*must be at least 1"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"use_qalora": True}, "use_qalora is set"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model's weights"),
        ({"modules_to_save": "lm_head"}, "modules_to_save must be a list of names, got 'lm_head'"),
        ({"lora_dropout": 1.0}, "dropout must be at least 0 and below 1"),
    ],
)
def test_settings_that_cannot_be_computed_are_refused_by_name(changes, message):
    # Catches an adapter of another kind that is read as if it were a plain one.
    with pytest.raises(ValueError, match=message):
        AdapterConfig.from_json(CONFIG | changes)


def test_a_configuration_returns_as_it_was():
    # Catches a setting that is written under another name than it is read by, or as what JSON is not.
    spec = AdapterSpec(
        4,
        6.5,
        targets=("k_proj", "q_proj"),
        use_rslora=True,
        use_dora=True,
        dropout=0.1,
        rank_pattern={"k_proj": 2},
        alpha_pattern={"k_proj": 3.0},
        modules_to_save=("lm_head",),
    )
    config = AdapterConfig(spec, base="org/base", fan_in_fan_out=True)
    assert AdapterConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (shapes(a=(3, 8)), "but the rank in adapter_config.json is 2"),
        (shapes(b=(4, 3)), "but the rank in adapter_config.json is 2"),
        (shapes(a=(16,)), "both must be matrices"),
        (held({keys_of("q_proj")[0]: (2, 8)}), "missing lora_B"),
        (shapes(base_model__model__q_proj__lora_A__default__weight=(2, 8)), "not a tensor name that PEFT writes"),
        (shapes(_orig_mod__q_proj__lora_A__weight=(2, 8)), "does not start with PEFT's prefix base_model.model."),
        (shapes(base_model__model__lm_head__weight=(4, 8)), r"modules_to_save \[\] does not name"),
        (
            shapes(base_model__model__layers__0__q_proj__lora_magnitude_vector=(4,)),
            "use_dora in adapter_config.json is false",
        ),
        (held({}), "the file has no tensors"),
    ],
)
def test_files_that_are_not_whole_are_refused(tensors, message):
    # Catches a shard, a half or a state dict with wrappers' names that would load as no adapter at all.
    with pytest.raises(ValueError, match=message):
        read_layout(AdapterConfig.from_json(CONFIG), tensors)


def test_an_adapter_for_another_base_is_told_by_names_and_shapes():
    # Catches an adapter that is put on a model of another size, or of which half the layers are missing.
    layout = read_layout(
        AdapterConfig.from_json(CONFIG | {"modules_to_save": ["norm"]}),
        shapes(base_model__model__norm__weight=(8,)),
    )
    assert differences(layout, {"layers.0.q_proj.weight": (4, 8), "norm.weight": (8,)}) == []
    told = differences(layout, {"layers.0.q_proj.weight": (6, 8)})
    assert told == [
        "layers.0.q_proj: the adapter is for a weight of [4, 8], the base has [6, 8]",
        "norm.weight: the base does not have this tensor",
    ]
    assert differences(layout, {"norm.weight": (8,)}) == ["layers.0.q_proj: the base does not have this layer"]


def test_names_are_as_short_as_they_may_be():
    # Catches target_modules and patterns that mean other layers to those who read them by the ends of names.
    every = ["a.0.q", "a.1.q", "a.0.k", "a.1.k"]
    assert shortest_names(["a.0.q", "a.1.q"], every) == ("q",)
    assert shortest_names(["a.0.q", "a.0.k", "a.1.k"], every) == ("a.0.q", "k")
    assert shared_value({"a.0.q": 8, "a.1.q": 8, "a.0.k": 4, "a.1.k": 2}) == (8, {"a.1.k": 2, "a.0.k": 4})


def test_folded_rows_do_not_depend_on_how_they_are_cut():
    # Catches rows of another part of B, or norms over part of a row.
    torch.manual_seed(0)
    weight = torch.randn(10, 6, dtype=torch.bfloat16)
    adapter = AdapterValues(torch.randn(2, 6), torch.randn(10, 2), torch.rand(10) + 1, 0.5)
    whole = fold(weight, adapter)
    assert whole.dtype == torch.float32
    assert torch.allclose(whole.norm(dim=1), adapter.magnitude, atol=1e-5)
    pieces = [fold(weight[start : start + 4], adapter, start=start) for start in (0, 4, 8)]
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=1e-6)
    turned = fold(weight.t(), adapter, transposed=True)
    torch.testing.assert_close(turned.t(), whole, rtol=0, atol=1e-5)
