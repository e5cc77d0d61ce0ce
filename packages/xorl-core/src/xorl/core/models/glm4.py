"""GLM-4 (0414): norms before and after each block, and a rotation of neighbouring channels in half of each head."""

from collections.abc import Mapping
from dataclasses import replace

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec

ARCHITECTURE = "Glm4ForCausalLM"
CHECKPOINT_NAMES = replace(
    rotary_gated.CHECKPOINT_NAMES,
    modules={"attention_output_norm": "post_self_attn_layernorm", "mlp_output_norm": "post_mlp_layernorm"},
    stacked=("gate_up_proj",),
)


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `attention_bias` applies to queries, keys and values."""
    hf = HFConfig(
        values,
        ARCHITECTURE,
        num_key_value_heads=2,
        head_dim=128,
        rms_norm_eps=1.5625e-07,
        partial_rotary_factor=0.5,
        pad_token_id=151329,
    )
    config = rotary_gated.read_config(
        hf,
        qkv_bias=hf.get("attention_bias", bool, True),
        norms="sandwich",
        partial_rope=True,
        interleaved_rope=True,
    )
    hf.finish()
    return config


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="glm4",
    config_from_hf=config_from_hf,
    checkpoint_names=CHECKPOINT_NAMES,
    adapter_targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"),
)
