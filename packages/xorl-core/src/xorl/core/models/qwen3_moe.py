"""Qwen3 MoE: query/key norms; every layer is a mixture of experts, unless the config makes it dense."""

from collections.abc import Mapping

from xorl.core.models import mixtures, rotary_gated
from xorl.core.models.decoder_config import DecoderConfig, ExpertsConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec
from xorl.core.nn.moe import RouterConfig

ARCHITECTURE = "Qwen3MoeForCausalLM"


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `mlp_only_layers` and `decoder_sparse_step` say which layers are dense."""
    hf = HFConfig(values, ARCHITECTURE, num_key_value_heads=4, sliding_window=4096)
    attention_bias = hf.get("attention_bias", bool, False)
    router = RouterConfig(normalize=hf.get("norm_topk_prob", bool, False))
    experts = mixtures.read_experts(hf, "moe_intermediate_size", ExpertsConfig(128, 8, 768, router))
    windows = rotary_gated.read_uniform_windows(hf)
    if not hf.get("use_sliding_window", bool, False):
        windows = (None,) * len(windows)
    config = rotary_gated.read_config(
        hf,
        qk_norm="head",
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        windows=windows,
        ffns=mixtures.read_ffns(hf, experts, mixtures.read_sparse_layers(hf)),
        balance_coef=mixtures.read_balance_coef(hf),
    )
    repeated = ["num_local_experts"] if values.get("num_local_experts") == experts.num_experts else []
    hf.finish(inert=["max_window_layers", "intermediate_size", *repeated], fixed={"use_qk_norm": True})
    return config


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="qwen3_moe",
    config_from_hf=config_from_hf,
    checkpoint_names=rotary_gated.CHECKPOINT_NAMES,
    adapter_targets=mixtures.ADAPTER_TARGETS,
)
