"""dots.llm1: norms of the heads of queries and keys; experts by corrected sigmoid scores, and shared ones."""

from collections.abc import Mapping

from xorl.core.models import mixtures, rotary_gated
from xorl.core.models.decoder_config import DecoderConfig, ExpertsConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec
from xorl.core.nn.moe import RouterConfig

ARCHITECTURE = "Dots1ForCausalLM"
# transformers has no default for these.
REQUIRED = ("n_routed_experts", "n_shared_experts", "num_experts_per_tok")


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `attention_bias` applies to all four projections.

    Layers from `max_window_layers` on have windows.
    """
    hf = HFConfig(values, ARCHITECTURE, num_key_value_heads=32, sliding_window=4096)
    for key in REQUIRED:
        hf.get(key, int)
    bias = hf.get("attention_bias", bool, False)
    num_layers, first = hf.positive("num_hidden_layers"), hf.get("max_window_layers", int, 62)
    is_windowed = [hf.has("sliding_window") and index >= first for index in range(num_layers)]
    pattern = [rotary_gated.SLIDING if windowed else rotary_gated.FULL for windowed in is_windowed]
    defaults = ExpertsConfig(1, 1, 1408, RouterConfig(normalize=False))
    config = rotary_gated.read_config(
        hf,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        windows=rotary_gated.windows_of(hf, pattern),
        ffns=mixtures.read_ffns_after_dense(hf, mixtures.read_grouped_experts(hf, defaults), default=0),
    )
    hf.finish(inert=["intermediate_size", "output_router_logits"])
    return config


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="dots1",
    config_from_hf=config_from_hf,
    checkpoint_names=rotary_gated.CHECKPOINT_NAMES,
    adapter_targets=mixtures.ADAPTER_TARGETS,
)
