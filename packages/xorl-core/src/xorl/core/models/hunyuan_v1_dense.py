"""Hunyuan (dense): heads are normalised after the rotation, whose base may be scaled by a fixed factor."""

from collections.abc import Mapping
from dataclasses import replace

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.rope_config import DEFAULT_THETA, nested_rope, read_rope
from xorl.core.models.spec import ModelSpec
from xorl.core.nn import RopeConfig

ARCHITECTURE = "HunYuanDenseV1ForCausalLM"
# Keys of released models that concern other members of the family: mixtures, images, classification.
INERT = ("attention_head_dim", "cla_share_factor", "dense_list", "num_media_embeds", "org_vocab_size", "pool_type")
FIXED: Mapping[str, object] = {
    "norm_type": "rms",
    "num_experts": 1,
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
}
CHECKPOINT_NAMES = replace(
    rotary_gated.CHECKPOINT_NAMES,
    modules={"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"},
)


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `attention_bias` applies to all four projections."""
    hf = HFConfig(values, ARCHITECTURE, rms_norm_eps=1e-5, pad_token_id=0)
    bias = hf.get("attention_bias", bool, False)
    config = rotary_gated.read_config(hf, rope=_read_rope(hf), qk_norm="head", qkv_bias=bias, o_bias=bias)
    hf.finish(inert=INERT, fixed=FIXED)
    return config.with_layers(lambda _, layer: replace(layer, mixer=replace(layer.attention, norm_after_rope=True)))


def _read_rope(hf: HFConfig) -> RopeConfig:
    """With `alpha`, dynamic rotary positions have a fixed base: theta * alpha^(C / (C - 2))."""
    scaling = nested_rope(hf)
    if not scaling.has("alpha"):
        return read_rope(hf, hf.positive("max_position_embeddings"))
    scaling.expect("rope_type", scaling.get("rope_type", str, scaling.get("type", str, "dynamic")), ["dynamic"])
    head_dim = hf.positive("head_dim", hf.positive("hidden_size") // hf.positive("num_attention_heads"))
    theta = scaling.get("rope_theta", float, hf.get("rope_theta", float, DEFAULT_THETA))
    for key in ("type", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        scaling.has(key)  # of no effect with alpha
    scaling.refuse_unread()
    return RopeConfig(theta=theta * scaling.get("alpha", float) ** (head_dim / (head_dim - 2)))


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="hunyuan_v1_dense",
    config_from_hf=config_from_hf,
    checkpoint_names=CHECKPOINT_NAMES,
    adapter_targets=rotary_gated.ADAPTER_TARGETS,
)
