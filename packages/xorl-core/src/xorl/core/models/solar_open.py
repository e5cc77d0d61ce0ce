"""Solar Open: every layer has experts by corrected sigmoid scores, and a shared one."""

from collections.abc import Mapping

from xorl.core.models import mixtures, rotary_gated
from xorl.core.models.decoder_config import DecoderConfig, ExpertsConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec
from xorl.core.nn.moe import RouterConfig

ARCHITECTURE = "SolarOpenForCausalLM"


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `attention_bias` applies to queries, keys and values."""
    hf = HFConfig(values, ARCHITECTURE, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=1e6)
    experts = mixtures.read_grouped_experts(hf, ExpertsConfig(128, 8, 1280, RouterConfig(normalize=True)))
    config = rotary_gated.read_config(
        hf,
        partial_rope=True,
        qkv_bias=hf.get("attention_bias", bool, False),
        ffns=[experts] * hf.positive("num_hidden_layers"),
    )
    hf.finish(inert=["intermediate_size", "output_router_logits"])
    return config


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="solar_open",
    config_from_hf=config_from_hf,
    checkpoint_names=rotary_gated.CHECKPOINT_NAMES,
    adapter_targets=mixtures.ADAPTER_TARGETS,
)
