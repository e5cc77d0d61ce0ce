"""OLMo 2: norms after attention and feed-forward instead of before, and RMS norms of all queries and of all keys."""

from collections.abc import Mapping
from dataclasses import replace

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig, LayerConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec

ARCHITECTURE = "Olmo2ForCausalLM"
CHECKPOINT_NAMES = replace(
    rotary_gated.CHECKPOINT_NAMES,
    modules={"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"},
)


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `attention_bias` applies to all four projections."""
    hf = HFConfig(values, ARCHITECTURE, rms_norm_eps=1e-5, pad_token_id=1)
    bias = hf.get("attention_bias", bool, False)
    config = rotary_gated.read_config(hf, qkv_bias=bias, o_bias=bias)
    hf.finish()
    return config.with_layers(after_blocks)


def after_blocks(index: int, layer: LayerConfig) -> LayerConfig:
    """The layer with norms after its blocks, and of all queries and all keys."""
    return replace(layer, norms="post", attention=replace(layer.attention, qk_norm="whole"))


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="olmo2",
    config_from_hf=config_from_hf,
    checkpoint_names=CHECKPOINT_NAMES,
    adapter_targets=rotary_gated.ADAPTER_TARGETS,
)
