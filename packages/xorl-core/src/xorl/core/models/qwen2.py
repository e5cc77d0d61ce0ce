"""Qwen2 and Qwen2.5: biases on queries, keys and values; optional sliding windows in the upper layers."""

from collections.abc import Mapping

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec

ARCHITECTURE = "Qwen2ForCausalLM"


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json."""
    hf = HFConfig(values, ARCHITECTURE, num_key_value_heads=32, sliding_window=4096)
    hf.refuse("use_mrope", "multi-dimensional positions are not implemented")
    config = rotary_gated.read_config(
        hf,
        qkv_bias=True,
        windows=rotary_gated.read_windows(hf),
    )
    # Of inference engines, for contexts longer than those that the model was trained for.
    hf.finish(inert=["dual_chunk_attention_config"])
    return config


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="qwen2",
    config_from_hf=config_from_hf,
    checkpoint_names=rotary_gated.CHECKPOINT_NAMES,
    adapter_targets=rotary_gated.ADAPTER_TARGETS,
)
