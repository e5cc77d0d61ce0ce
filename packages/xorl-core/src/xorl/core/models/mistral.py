"""Mistral (dense): grouped-query attention with one sliding window for all layers, or none."""

from collections.abc import Mapping

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec

ARCHITECTURE = "MistralForCausalLM"


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json."""
    hf = HFConfig(values, ARCHITECTURE, num_key_value_heads=8, sliding_window=4096)
    config = rotary_gated.read_config(
        hf,
        windows=rotary_gated.read_uniform_windows(hf),
    )
    hf.finish()
    return config


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="mistral",
    config_from_hf=config_from_hf,
    checkpoint_names=rotary_gated.CHECKPOINT_NAMES,
    adapter_targets=rotary_gated.ADAPTER_TARGETS,
    composites=("Mistral3ForConditionalGeneration",),
)
