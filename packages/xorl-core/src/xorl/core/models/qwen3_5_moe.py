"""Qwen3.5, 3.6 and 3.8 with experts: gated delta nets; experts in every layer, and a shared one with a gate."""

from collections.abc import Mapping

from xorl.core.models import delta_nets, mixtures
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec

ARCHITECTURE = "Qwen3_5MoeForCausalLM"
# The text_config of a composite model leaves out what it has of these.
DEFAULTS: Mapping[str, object] = {
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
}


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json."""
    hf = HFConfig(values, ARCHITECTURE, **delta_nets.DEFAULTS, **DEFAULTS)
    experts = mixtures.read_experts_beside_gated(hf, 256, 8, width=512, shared_width=512, normalize=True)
    coef = mixtures.read_balance_coef(hf)
    ffns = [experts] * hf.positive("num_hidden_layers")
    return delta_nets.read_config(hf, ffns, by_key_head=False, balance_coef=coef, inert=["intermediate_size"])


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="qwen3_5_moe_text",
    config_from_hf=config_from_hf,
    checkpoint_names=delta_nets.NAMES_WITH_SHARED_EXPERTS,
    adapter_targets=delta_nets.ADAPTER_TARGETS,
    composites=("Qwen3_5MoeForConditionalGeneration",),
)
