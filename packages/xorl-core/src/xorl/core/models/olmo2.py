"""OLMo 2: norms after attention and feed-forward instead of before, and RMS norms of all queries and of all keys."""

from collections.abc import Mapping
from dataclasses import replace

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec

ARCHITECTURE = "Olmo2ForCausalLM"


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `attention_bias` applies to all four projections."""
    hf = HFConfig(values, ARCHITECTURE, rms_norm_eps=1e-5, pad_token_id=1)
    bias = hf.get("attention_bias", bool, False)
    config = rotary_gated.read_config(hf, norms="post", qk_norm="whole", qkv_bias=bias, o_bias=bias)
    hf.finish()
    return config


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="olmo2",
    config_from_hf=config_from_hf,
    checkpoint_names=replace(rotary_gated.CHECKPOINT_NAMES, modules=rotary_gated.AFTER_BLOCKS),
    adapter_targets=rotary_gated.ADAPTER_TARGETS,
)
