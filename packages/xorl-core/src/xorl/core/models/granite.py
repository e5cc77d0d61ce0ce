"""Granite 3: factors on embeddings, attention scores, residual branches and logits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig, DenseConfig, ExpertsConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec

ARCHITECTURE = "GraniteForCausalLM"


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json."""
    hf = HFConfig(values, ARCHITECTURE)
    config = read_config(hf, mlp_bias=hf.get("mlp_bias", bool, False))
    hf.finish()
    return config


def read_config(
    hf: HFConfig,
    *,
    mlp_bias: bool = False,
    ffns: Sequence[DenseConfig | ExpertsConfig] | None = None,
    balance_coef: float = 0.0,
) -> DecoderConfig:
    """Read the keys of all families with these factors. Logits are divided by `logits_scaling`.

    ffns: of each layer; None means gated blocks of intermediate_size.
    """
    bias = hf.get("attention_bias", bool, False)
    config = rotary_gated.read_config(
        hf, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias, ffns=ffns, balance_coef=balance_coef
    )
    scale = hf.get("attention_multiplier", float, 1.0)
    return replace(
        config.with_layers(lambda _, layer: replace(layer, mixer=replace(layer.attention, scale=scale))),
        embed_scale=hf.get("embedding_multiplier", float, 1.0),
        residual_scale=hf.get("residual_multiplier", float, 1.0),
        logit_scale=1 / hf.above_zero("logits_scaling", 1.0),
    )


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="granite",
    config_from_hf=config_from_hf,
    checkpoint_names=rotary_gated.CHECKPOINT_NAMES,
    adapter_targets=rotary_gated.ADAPTER_TARGETS,
)
