"""DeepSeek-V3 and R1, Kimi K2's text model, Moonlight: attention through latents; after dense layers, experts by
corrected and grouped scores, and shared ones."""

from collections.abc import Mapping

from xorl.core.models import latents, mixtures, rotary_gated
from xorl.core.models.decoder_config import DecoderConfig, ExpertsConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec
from xorl.core.nn.moe import RouterConfig

ARCHITECTURE = "DeepseekV3ForCausalLM"
DEFAULTS: Mapping[str, object] = {
    "num_key_value_heads": 128,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
DEFAULT_EXPERTS = ExpertsConfig(256, 8, 2048, RouterConfig(normalize=True))
# Keys that only the original code reads, with the values for which transformers computes the same.
FIXED: Mapping[str, object] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
INERT = (
    "intermediate_size",  # of dense layers, if there are any
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "ep_size",
    "seq_aux",
    "aux_loss_alpha",
    "output_router_logits",
)


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json."""
    hf = HFConfig(values, ARCHITECTURE, **DEFAULTS, **latents.DEFAULTS)
    experts = mixtures.read_grouped_experts(hf, DEFAULT_EXPERTS)
    config = latents.read_config(hf, mixtures.read_ffns_after_dense(hf, experts, default=3))
    hf.finish(inert=INERT, fixed=FIXED)
    return config


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="deepseek_v3",
    config_from_hf=config_from_hf,
    checkpoint_names=rotary_gated.NAMES_WITH_MTP_LAYERS,
    adapter_targets=latents.ADAPTER_TARGETS,
)
