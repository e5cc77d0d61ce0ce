"""Seed-OSS: biases on queries, keys and values; heads that are wider than the model's width divided by their number."""

from collections.abc import Mapping

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec

ARCHITECTURE = "SeedOssForCausalLM"


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `attention_bias` applies to queries, keys and values."""
    hf = HFConfig(values, ARCHITECTURE, num_key_value_heads=8, head_dim=128, pad_token_id=1)
    config = rotary_gated.read_config(
        hf,
        qkv_bias=hf.get("attention_bias", bool, True),
        o_bias=hf.get("attention_out_bias", bool, False),
        mlp_bias=hf.get("mlp_bias", bool, False),
    )
    hf.finish()
    return config


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="seed_oss",
    config_from_hf=config_from_hf,
    checkpoint_names=rotary_gated.CHECKPOINT_NAMES,
    adapter_targets=rotary_gated.ADAPTER_TARGETS,
)
