"""Config keys shared by families whose layers have gated delta nets and, at intervals, gated attention."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from xorl.core.models import mixtures, rotary_gated
from xorl.core.models.decoder_config import DecoderConfig, DenseConfig, ExpertsConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.rope_config import read_rope
from xorl.core.nn import NormConfig
from xorl.core.nn.gated_delta_net import GatedDeltaConfig
from xorl.core.nn.layers import SWIGLU_ACTIVATIONS

LINEAR = "linear_attention"
ADAPTER_TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj"),
)
_MODULES = {"linear_attn.decay": "linear_attn"}
# The unused layers predict further tokens.
CHECKPOINT_NAMES = replace(rotary_gated.CHECKPOINT_NAMES, modules=_MODULES, unused=r"mtp\.")
NAMES_WITH_SHARED_EXPERTS = replace(
    CHECKPOINT_NAMES, modules={**mixtures.shared_names("mlp.shared_expert"), **_MODULES}
)
DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "num_attention_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "partial_rotary_factor": 0.25,
    }
)
# Positions of images in three directions. Those of text are the same in each, which is the ordinary rotation.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
# States are in fp32 whatever this says; the others are of the layers that predict further tokens.
_INERT = ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")


def read_config(
    hf: HFConfig,
    ffns: Sequence[DenseConfig | ExpertsConfig] | None = None,
    *,
    by_key_head: bool,
    balance_coef: float = 0.0,
    inert: Sequence[str] = (),
) -> DecoderConfig:
    """Read config.json, of which the family has read what its experts need.

    by_key_head: as in `GatedDeltaConfig`. inert: further keys without an effect.
    """
    hf.expect("hidden_act", hf.get("hidden_act", str, "silu"), SWIGLU_ACTIVATIONS)
    bias = hf.get("attention_bias", bool, False)
    rope = read_rope(hf, hf.positive("max_position_embeddings"), partial_of=hf.positive("head_dim"), read=_OF_IMAGES)
    norm = NormConfig("rms", hf.get("rms_norm_eps", float, 1e-6), offset=1.0)
    config = rotary_gated.read_config(
        hf, rope=rope, qk_norm="head", qkv_bias=bias, o_bias=bias, ffns=ffns, balance_coef=balance_coef, norm=norm
    )
    delta = _read_delta(hf, by_key_head=by_key_head)
    types = _read_types(hf, config.num_layers)
    hf.finish(inert=(*_INERT, *inert), fixed={"attn_output_gate": True})
    return config.with_layers(
        lambda index, layer: replace(
            layer, mixer=delta if types[index] == LINEAR else replace(layer.attention, output_gate=True)
        )
    )


def _read_delta(hf: HFConfig, *, by_key_head: bool) -> GatedDeltaConfig:
    num_key_heads, num_value_heads = hf.positive("linear_num_key_heads"), hf.positive("linear_num_value_heads")
    if num_value_heads % num_key_heads:
        raise ValueError(
            f"{hf.architecture}: linear_num_value_heads: {num_value_heads} is not a multiple of linear_num_key_heads: "
            f"{num_key_heads}"
        )
    return GatedDeltaConfig(
        num_key_heads,
        num_value_heads,
        hf.positive("linear_key_head_dim"),
        hf.positive("linear_value_head_dim"),
        hf.positive("linear_conv_kernel_dim"),
        by_key_head,
    )


def _read_types(hf: HFConfig, num_layers: int) -> Sequence[str]:
    """The kind of each layer from `layer_types`; else, attention in every `full_attention_interval`-th layer."""
    interval = hf.positive("full_attention_interval", 4)
    pattern = [LINEAR if (index + 1) % interval else rotary_gated.FULL for index in range(num_layers)]
    return rotary_gated.read_layer_types(hf, pattern, [LINEAR, rotary_gated.FULL])
