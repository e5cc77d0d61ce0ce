"""What the lora section makes of a model: adapters, errors that name the option, and the work that is counted."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tiny_models import hf_config
from xorl.config import config_from_mapping
from xorl.config.local import LoraConfig
from xorl.core.models import SPECS, Decoder
from xorl.core.nn import LayerKernels
from xorl.kernels.attention.reference import eager_attention
from xorl.kernels.layout import SequenceLayout
from xorl.lora import adapters
from xorl.train.adapters.inject import add_adapters, flops_of

SIZES = hf_config(vocab_size=50)
FAMILY = SPECS["Qwen3ForCausalLM"]


def decoder() -> Decoder:
    model = FAMILY.build(FAMILY.config_from_hf(SIZES), kernels=LayerKernels(attention=eager_attention))
    model.init_weights(0)
    return model


def with_adapters(**lora: object) -> Decoder:
    model = decoder()
    add_adapters(model, LoraConfig.model_validate({"enable_lora": True, **lora}), FAMILY)
    return model


@pytest.mark.parametrize(
    "lora",
    [
        {"lora_target_modules": ["o_proj", "down_proj"]},
        {"lora_target_modules": ["o_proj"], "modules_to_save": ["down_proj"]},
    ],
)
def test_work_that_is_counted_is_the_work_that_is_done(lora: dict) -> None:
    # Catches an MFU that counts gradients of frozen weights, or leaves out those of adapters.
    model = with_adapters(**lora)
    lengths = [9, 4]
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(50, (13,)), SequenceLayout.from_lengths(lengths)).sum().backward()
    assert counter.get_total_flops() == flops_of(model.config, model)(lengths)


def test_targets_are_the_family_s_own_where_none_are_named() -> None:
    # Catches a default that adapts nothing, or the head too.
    names = {name.rpartition(".")[2] for name in adapters(with_adapters())}
    assert names == set(FAMILY.adapter_targets)
    assert {name.rpartition(".")[2] for name in adapters(with_adapters(lora_target_modules="all-linear"))} == names


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"moe_hybrid_shared_lora": True}, r"(?s)lora\.moe_shared_lora.*set one to false"),
        (
            {"moe_lora_format": "sglang"},
            r"(?s)lora\.moe_lora_format.*whose outer factors are shared",
        ),
    ],
)
def test_experts_share_in_one_way_and_in_a_form_that_can_say_so(lora: dict, message: str) -> None:
    # Catches a run in which one of two options silently wins.
    values = {"model": {"config_path": "c"}, "data": {"datasets": [{"path": "a"}]}, "train": {"output_dir": "o"}}
    with pytest.raises(ValueError, match=message):
        config_from_mapping({**values, "lora": {"enable_lora": True, "moe_shared_lora": True, **lora}})


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"lora_target_modules": ["qproj"]}, r"^lora\.lora_target_modules: .*'qproj'.*'q_proj'"),
        ({"rank_pattern": {"qproj": 4}}, r"^lora\.rank_pattern: 'qproj' does not match any"),
        ({"alpha_pattern": {"(": 4.0}}, r"^lora\.alpha_pattern: '\(' is not a valid regular expression"),
        ({"modules_to_save": ["head"]}, r"^lora\.modules_to_save: 'head' matches no module"),
        ({"use_dora": True, "lora_target_modules": ["embed_tokens"]}, r"^lora\.use_dora: .*embed_tokens"),
        ({"moe_shared_lora": True}, r"^lora\.moe_shared_lora: the targets name no layer of experts"),
        ({"moe_hybrid_shared_lora": True}, r"^lora\.moe_hybrid_shared_lora: the targets name no layer of experts"),
        ({"moe_lora_format": "peft"}, r"^lora\.moe_lora_format: only adapters on experts have forms"),
    ],
)
def test_an_error_begins_with_the_option_at_fault(lora: dict, message: str) -> None:
    # Catches a message about a field that the user has never seen.
    with pytest.raises(ValueError, match=message):
        with_adapters(**lora)
