"""Phi 3, 3.5 and 4: checkpoints stack projections, and a part of each head may rotate (longrope)."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec
from xorl.core.nn.rotary import RopeKind

ARCHITECTURE = "Phi3ForCausalLM"
# Older files call longrope "su" or "yarn".
ROPE_TYPES: Mapping[str, RopeKind] = MappingProxyType(
    {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
)
CHECKPOINT_NAMES = replace(rotary_gated.CHECKPOINT_NAMES, stacked=("qkv_proj", "gate_up_proj"))


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json."""
    hf = HFConfig(values, ARCHITECTURE, rms_norm_eps=1e-5, pad_token_id=32000, original_max_position_embeddings=4096)
    config = rotary_gated.read_config(
        hf, rope_types=ROPE_TYPES, partial_rope=True, windows=rotary_gated.read_uniform_windows(hf)
    )
    hf.finish(inert=["original_max_position_embeddings"], fixed={"full_attn_mod": 1, "interpolate_factor": 1})
    return config


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="phi3",
    config_from_hf=config_from_hf,
    checkpoint_names=CHECKPOINT_NAMES,
    adapter_targets=("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
)
