"""Config keys shared by families whose heads are projected from latents."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig, DenseConfig, ExpertsConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.rope_config import nested_rope, yarn_magnitude
from xorl.core.nn.attention import LatentConfig

ADAPTER_TARGETS = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
DEFAULTS: Mapping[str, object] = MappingProxyType(
    {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
)
# The norms of latents use this whatever `rms_norm_eps` is.
EPS = 1e-6


def read_config(hf: HFConfig, ffns: Sequence[DenseConfig | ExpertsConfig]) -> DecoderConfig:
    """Read config.json except for the feed-forward blocks of layers, `ffns`.

    `attention_bias` applies to the projections of the input and to that of the output.
    """
    bias, interleaved = hf.get("attention_bias", bool, False), hf.get("rope_interleave", bool, True)
    config = rotary_gated.read_config(hf, interleaved_rope=interleaved, qkv_bias=bias, o_bias=bias, ffns=ffns)
    return _with_latents(hf, config)


def _with_latents(hf: HFConfig, config: DecoderConfig) -> DecoderConfig:
    """The configuration with heads that are projected from latents. A null `q_lora_rank` means none for queries."""
    latent = LatentConfig(
        q_rank=hf.positive("q_lora_rank") if hf.has("q_lora_rank") else None,
        kv_rank=hf.positive("kv_lora_rank"),
        rope_dim=hf.positive("qk_rope_head_dim"),
        v_head_dim=hf.positive("v_head_dim"),
        eps=EPS,
    )
    head_dim = hf.positive("qk_nope_head_dim") + latent.rope_dim
    # What transformers derives, and rotates.
    hf.expect("qk_head_dim", hf.positive("qk_head_dim", head_dim), [head_dim])
    hf.expect("head_dim", hf.positive("head_dim", latent.rope_dim), [latent.rope_dim])
    scale = head_dim**-0.5 * _score_factor(hf)
    num_heads = config.layers[0].attention.num_heads
    hf.expect("num_key_value_heads", hf.positive("num_key_value_heads", num_heads), [num_heads])
    return config.with_layers(
        lambda _, layer: replace(layer, mixer=replace(layer.attention, head_dim=head_dim, scale=scale, latent=latent))
    )


def _score_factor(hf: HFConfig) -> float:
    """The factor on scores of an extended context, which is not in cosines and sines where both scales are given."""
    rope = nested_rope(hf)
    weight = rope.get("mscale_all_dim", float, 0.0)
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    return 1.0 if kind == "default" or not weight else yarn_magnitude(rope.get("factor", float), weight) ** 2
