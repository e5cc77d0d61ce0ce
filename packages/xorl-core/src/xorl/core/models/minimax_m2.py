"""MiniMax M2: RMS norms of all queries and all keys, of which a part rotates; experts by corrected sigmoid scores."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from xorl.core.models import mixtures, rotary_gated
from xorl.core.models.decoder_config import DecoderConfig, ExpertsConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec
from xorl.core.models.stacks import ExpertNames
from xorl.core.nn.moe import RouterConfig

ARCHITECTURE = "MiniMaxM2ForCausalLM"
DEFAULTS: Mapping[str, object] = MappingProxyType({"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e6})
DEFAULT_EXPERTS = ExpertsConfig(256, 8, 1536, RouterConfig(normalize=True, scores="sigmoid", corrected=True))
EXPERT_NAMES = ExpertNames(
    "block_sparse_moe.gate",
    "block_sparse_moe.experts.{}",
    "w1",
    "w3",
    "w2",
    correction="block_sparse_moe.e_score_correction_bias",
)
# Keys that only the original code reads: what it would compute with other values is not what transformers does.
FIXED: Mapping[str, object] = MappingProxyType(
    {
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
        "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0,
    }
)
INERT = ("mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode", "use_mtp")


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `rotary_dim`, the channels of a head that rotate, is an older form of partial_rotary_factor."""
    hf = HFConfig(values, ARCHITECTURE, **DEFAULTS)
    if hf.has("rotary_dim"):
        fraction = hf.positive("rotary_dim") / hf.positive("head_dim")
        hf = HFConfig(values, ARCHITECTURE, **DEFAULTS, partial_rotary_factor=fraction)
    if hf.get("router_jitter_noise", float, 0.0):
        raise ValueError(f"{ARCHITECTURE}: router_jitter_noise is not supported; set it to 0")
    num_layers = hf.positive("num_hidden_layers")
    config = rotary_gated.read_config(
        hf,
        partial_rope=True,
        qk_norm="whole",
        ffns=[mixtures.read_experts(hf, "intermediate_size", DEFAULT_EXPERTS)] * num_layers,
        balance_coef=mixtures.read_balance_coef(hf),
    )
    hf.finish(inert=(*INERT, "rotary_dim"), fixed={**FIXED, "attn_type_list": [1] * num_layers})
    return config


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="minimax_m2",
    config_from_hf=config_from_hf,
    checkpoint_names=replace(rotary_gated.CHECKPOINT_NAMES, experts=EXPERT_NAMES),
    adapter_targets=mixtures.ADAPTER_TARGETS,
)
