"""GLM-4.5 to 4.7: half of each head rotates; after dense layers, experts by corrected scores and a shared one."""

from collections.abc import Mapping

from xorl.core.models import mixtures, rotary_gated
from xorl.core.models.decoder_config import DecoderConfig, ExpertsConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec
from xorl.core.nn.moe import RouterConfig

ARCHITECTURE = "Glm4MoeForCausalLM"
INERT = ("intermediate_size", "num_nextn_predict_layers", "num_mtp_layers", "output_router_logits")


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `attention_bias` applies to queries, keys and values."""
    hf = HFConfig(values, ARCHITECTURE, num_key_value_heads=8, rms_norm_eps=1e-5, partial_rotary_factor=0.5)
    defaults = ExpertsConfig(128, 8, 1408, RouterConfig(normalize=True))
    config = rotary_gated.read_config(
        hf,
        partial_rope=True,
        qk_norm="head" if hf.get("use_qk_norm", bool, False) else None,
        qkv_bias=hf.get("attention_bias", bool, False),
        ffns=mixtures.read_ffns_after_dense(hf, mixtures.read_grouped_experts(hf, defaults), default=1),
    )
    hf.finish(inert=INERT)
    return config


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="glm4_moe",
    config_from_hf=config_from_hf,
    checkpoint_names=rotary_gated.NAMES_WITH_MTP_LAYERS,
    adapter_targets=mixtures.ADAPTER_TARGETS,
)
