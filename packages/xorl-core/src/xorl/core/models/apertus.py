"""Apertus: heads are normalised, and a plain feed-forward block has xIELU, an activation with trained scalars."""

from collections.abc import Mapping
from dataclasses import replace

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig, DenseConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec
from xorl.core.nn.layers import ACTIVATIONS, TRAINED_ACTIVATIONS

ARCHITECTURE = "ApertusForCausalLM"
DEFAULT_THETA = 12e6
DEFAULT_ROPE: Mapping[str, object] = {
    "rope_type": "llama3",
    "rope_theta": DEFAULT_THETA,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
CHECKPOINT_NAMES = replace(
    rotary_gated.CHECKPOINT_NAMES,
    modules={
        "input_layernorm": "attention_layernorm",
        "post_attention_layernorm": "feedforward_layernorm",
        "mlp.activation": "mlp.act_fn",
    },
)


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `attention_bias` applies to all four projections."""
    hf = HFConfig(
        values,
        ARCHITECTURE,
        rms_norm_eps=1e-5,
        pad_token_id=3,
        rope_theta=DEFAULT_THETA,
        rope_parameters=DEFAULT_ROPE,
    )
    _require_scaling(HFConfig(values, ARCHITECTURE))
    bias = hf.get("attention_bias", bool, False)
    activation = hf.expect("hidden_act", hf.get("hidden_act", str, "xielu"), (*ACTIVATIONS, *TRAINED_ACTIVATIONS))
    ffn = DenseConfig("plain", hf.positive("intermediate_size"), activation, bias=False)
    config = rotary_gated.read_config(
        hf,
        rope_types=rotary_gated.BANDED_ROPE_TYPES,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        ffns=[ffn] * hf.positive("num_hidden_layers"),
    )
    hf.finish(fixed={"qk_norm": True})
    return config


def _require_scaling(given: HFConfig) -> None:
    """Raise ValueError for a base of rotary positions without their scaling.

    transformers 4 took this for positions that are not scaled, and transformers 5 takes its own base and scaling.
    """
    if given.has("rope_theta") and not given.has("rope_scaling") and not given.has("rope_parameters"):
        theta = given.get("rope_theta", float)
        raise ValueError(
            f"{ARCHITECTURE}: rope_theta: {theta} without rope_scaling, which is ambiguous; for positions that are not "
            f"scaled, replace it by rope_parameters: {{rope_type: default, rope_theta: {theta}}}"
        )


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="apertus",
    config_from_hf=config_from_hf,
    checkpoint_names=CHECKPOINT_NAMES,
    adapter_targets=("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
)
