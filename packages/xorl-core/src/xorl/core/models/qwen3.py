"""Qwen3 (dense): RMS norms on queries and keys, an independent head_dim, optional sliding windows."""

from collections.abc import Mapping

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec

ARCHITECTURE = "Qwen3ForCausalLM"


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `attention_bias` applies to all four projections."""
    hf = HFConfig(values, ARCHITECTURE, num_key_value_heads=32, head_dim=128, sliding_window=4096)
    attention_bias = hf.get("attention_bias", bool, False)
    config = rotary_gated.read_config(
        hf,
        qk_norm="head",
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        windows=rotary_gated.read_windows(hf),
    )
    hf.finish()
    return config


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="qwen3",
    config_from_hf=config_from_hf,
    checkpoint_names=rotary_gated.CHECKPOINT_NAMES,
    adapter_targets=rotary_gated.ADAPTER_TARGETS,
)
