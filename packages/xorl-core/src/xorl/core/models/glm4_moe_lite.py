"""GLM-4.7-Flash: attention through latents; after a dense layer, experts by corrected scores and a shared one."""

from collections.abc import Mapping

from xorl.core.models import latents, mixtures, rotary_gated
from xorl.core.models.decoder_config import DecoderConfig, ExpertsConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec
from xorl.core.nn.moe import RouterConfig

ARCHITECTURE = "Glm4MoeLiteForCausalLM"
DEFAULTS: Mapping[str, object] = {
    **latents.DEFAULTS,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.8,
}
DEFAULT_EXPERTS = ExpertsConfig(64, 4, 1536, RouterConfig(normalize=True))
DENSE, SPARSE = "dense", "sparse"
# Keys that only the original code reads, with the values for which transformers computes the same.
FIXED: Mapping[str, object] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "partial_rotary_factor": 1.0}
INERT = ("intermediate_size", "num_nextn_predict_layers", "num_mtp_layers", "output_router_logits")


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `mlp_layer_types` says which layers have experts; by default, all but the first one."""
    hf = HFConfig(values, ARCHITECTURE, **DEFAULTS)
    num_layers = hf.positive("num_hidden_layers")
    pattern = [DENSE, *[SPARSE] * (num_layers - 1)]
    kinds = rotary_gated.read_layer_types(hf, pattern, (DENSE, SPARSE), "mlp_layer_types")
    is_sparse = [kind == SPARSE for kind in kinds]
    experts = mixtures.read_grouped_experts(hf, DEFAULT_EXPERTS)
    config = latents.read_config(hf, mixtures.read_ffns(hf, experts, is_sparse))
    num_dense = [*is_sparse, True].index(True)
    hf.finish(inert=INERT, fixed={**FIXED, "first_k_dense_replace": num_dense})
    return config


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="glm4_moe_lite",
    config_from_hf=config_from_hf,
    checkpoint_names=rotary_gated.NAMES_WITH_MTP_LAYERS,
    adapter_targets=latents.ADAPTER_TARGETS,
)
