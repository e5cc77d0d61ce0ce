"""Qwen3.5, 3.6 and 3.8 (dense): gated delta nets, and gated attention in every fourth layer."""

from collections.abc import Mapping

from xorl.core.models import delta_nets
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec

ARCHITECTURE = "Qwen3_5ForCausalLM"
# The text_config of a composite model leaves out what it has of these.
DEFAULTS: Mapping[str, object] = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json."""
    return delta_nets.read_config(HFConfig(values, ARCHITECTURE, **delta_nets.DEFAULTS, **DEFAULTS), by_key_head=False)


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="qwen3_5_text",
    config_from_hf=config_from_hf,
    checkpoint_names=delta_nets.CHECKPOINT_NAMES,
    adapter_targets=(*delta_nets.ADAPTER_TARGETS, "gate_proj", "up_proj", "down_proj"),
    composites=("Qwen3_5ForConditionalGeneration",),
)
