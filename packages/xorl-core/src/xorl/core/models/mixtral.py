"""Mixtral: grouped-query attention; every layer is a mixture of experts that normalises its routing weights."""

from collections.abc import Mapping
from dataclasses import replace

from xorl.core.models import mixtures, rotary_gated
from xorl.core.models.decoder_config import DecoderConfig, ExpertsConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec
from xorl.core.models.stacks import ExpertNames
from xorl.core.nn.moe import RouterConfig

ARCHITECTURE = "MixtralForCausalLM"
DEFAULT_EXPERTS = ExpertsConfig(8, 2, 14336, RouterConfig(normalize=True))
EXPERT_NAMES = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts.{}", "w1", "w3", "w2")


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json."""
    hf = HFConfig(values, ARCHITECTURE, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6)
    if hf.get("router_jitter_noise", float, 0.0):
        raise ValueError(f"{ARCHITECTURE}: router_jitter_noise is not supported; set it to 0")
    experts = mixtures.read_experts(hf, "intermediate_size", DEFAULT_EXPERTS)
    config = rotary_gated.read_config(
        hf,
        windows=rotary_gated.read_uniform_windows(hf),
        ffns=[experts] * hf.positive("num_hidden_layers"),
        balance_coef=mixtures.read_balance_coef(hf),
    )
    hf.finish()
    return config


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="mixtral",
    config_from_hf=config_from_hf,
    checkpoint_names=replace(rotary_gated.CHECKPOINT_NAMES, experts=EXPERT_NAMES),
    adapter_targets=mixtures.ADAPTER_TARGETS,
)
