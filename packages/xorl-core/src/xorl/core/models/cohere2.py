"""Command R7B and A (Cohere 2): attention and feed-forward side by side after one norm, which subtracts the mean."""

from collections.abc import Mapping
from dataclasses import replace

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec
from xorl.core.nn import NormConfig

ARCHITECTURE = "Cohere2ForCausalLM"
# Keys of released models, with what the family computes anyway.
FIXED: Mapping[str, object] = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
}


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. Only layers with a sliding window rotate queries and keys."""
    hf = HFConfig(values, ARCHITECTURE, sliding_window=4096, head_dim=128, pad_token_id=0, tie_word_embeddings=True)
    bias = hf.get("attention_bias", bool, False)
    config = rotary_gated.read_config(
        hf,
        norms="parallel",
        qkv_bias=bias,
        o_bias=bias,
        windows=rotary_gated.read_patterned_windows(hf, "sliding_window_pattern", 4),
        interleaved_rope=True,
        norm=NormConfig("layer", hf.get("layer_norm_eps", float, 1e-5)),
    )
    config = replace(config, logit_scale=hf.get("logit_scale", float, 0.0625))
    hf.finish(inert=["layer_switch"], fixed=FIXED)
    return config.with_ropes(full=None, sliding=config.layers[0].attention.rope)


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="cohere2",
    config_from_hf=config_from_hf,
    checkpoint_names=rotary_gated.CHECKPOINT_NAMES,
    adapter_targets=rotary_gated.ADAPTER_TARGETS,
)
