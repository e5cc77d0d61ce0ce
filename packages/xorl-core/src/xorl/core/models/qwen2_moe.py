"""Qwen2 MoE (Qwen 1.5 and 2): biases of queries, keys and values; experts, and a shared one with a gate of its own."""

from collections.abc import Mapping
from dataclasses import replace

from xorl.core.models import mixtures, rotary_gated
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec

ARCHITECTURE = "Qwen2MoeForCausalLM"
DEFAULT_MAX_WINDOW_LAYERS = 28
CHECKPOINT_NAMES = replace(rotary_gated.CHECKPOINT_NAMES, modules=mixtures.shared_names("mlp.shared_expert"))


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. Where windows are used, every second layer has one, up to `max_window_layers`."""
    hf = HFConfig(values, ARCHITECTURE, num_key_value_heads=16, sliding_window=4096)
    last = hf.get("max_window_layers", int, DEFAULT_MAX_WINDOW_LAYERS)
    has_window = [index % 2 == 0 and index < last for index in range(hf.positive("num_hidden_layers"))]
    normalize = hf.get("norm_topk_prob", bool, False)
    experts = mixtures.read_experts_beside_gated(hf, 60, 4, width=1408, shared_width=5632, normalize=normalize)
    config = rotary_gated.read_config(
        hf,
        qkv_bias=hf.get("qkv_bias", bool, True),
        windows=rotary_gated.read_enabled_windows(hf, has_window),
        ffns=mixtures.read_ffns(hf, experts, mixtures.read_sparse_layers(hf)),
        balance_coef=mixtures.read_balance_coef(hf),
    )
    hf.finish(inert=["intermediate_size"])
    return config


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="qwen2_moe",
    config_from_hf=config_from_hf,
    checkpoint_names=CHECKPOINT_NAMES,
    adapter_targets=mixtures.ADAPTER_TARGETS,
)
