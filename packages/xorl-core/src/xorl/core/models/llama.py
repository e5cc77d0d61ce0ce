"""Llama 2 and 3.x: rotary positions, RMS norms, gated feed-forward; biases only if the config sets them."""

from collections.abc import Mapping

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec

ARCHITECTURE = "LlamaForCausalLM"


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `attention_bias` applies to all four projections, `mlp_bias` to all three."""
    # The defaults of transformers, which files of composite models leave out.
    hf = HFConfig(
        values,
        ARCHITECTURE,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        vocab_size=32000,
    )
    attention_bias = hf.get("attention_bias", bool, False)
    config = rotary_gated.read_config(
        hf,
        rope_types=rotary_gated.BANDED_ROPE_TYPES,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=hf.get("mlp_bias", bool, False),
    )
    hf.finish(inert=["is_llama_config"])
    return config


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="llama",
    config_from_hf=config_from_hf,
    checkpoint_names=rotary_gated.CHECKPOINT_NAMES,
    adapter_targets=rotary_gated.ADAPTER_TARGETS,
)
