"""Qwen3 MoE: query/key norms; every layer is a mixture of experts, unless the config makes it dense."""

from collections.abc import Mapping

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig, ExpertsConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec

ARCHITECTURE = "Qwen3MoeForCausalLM"


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `mlp_only_layers` and `decoder_sparse_step` say which layers are dense."""
    hf = HFConfig(values, ARCHITECTURE, num_key_value_heads=4, sliding_window=4096)
    attention_bias = hf.get("attention_bias", bool, False)
    num_layers, step = hf.positive("num_hidden_layers"), hf.positive("decoder_sparse_step", 1)
    dense_layers = set(hf.integers("mlp_only_layers"))
    defaults = ExpertsConfig(128, 8, 768, normalize=hf.get("norm_topk_prob", bool, False))
    experts = rotary_gated.read_experts(hf, "moe_intermediate_size", defaults)
    is_dense = [index in dense_layers or (index + 1) % step != 0 for index in range(num_layers)]
    if all(is_dense):
        raise ValueError(
            f"{ARCHITECTURE}: mlp_only_layers and decoder_sparse_step make every layer dense; use Qwen3ForCausalLM"
        )
    windows = rotary_gated.read_uniform_windows(hf)
    if not hf.get("use_sliding_window", bool, False):
        windows = (None,) * num_layers
    config = rotary_gated.read_config(
        hf,
        qk_norm=True,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        windows=windows,
        ffns=[rotary_gated.read_dense(hf, bias=False) if dense else experts for dense in is_dense],
        balance_coef=rotary_gated.read_balance_coef(hf),
    )
    repeated = ["num_local_experts"] if values.get("num_local_experts") == experts.num_experts else []
    hf.finish(inert=["max_window_layers", "intermediate_size", *repeated], fixed={"use_qk_norm": True})
    return config


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="qwen3_moe",
    config_from_hf=config_from_hf,
    checkpoint_names=rotary_gated.CHECKPOINT_NAMES,
    adapter_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
)
