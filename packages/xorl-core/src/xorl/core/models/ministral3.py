"""Ministral 3: yarn, and queries that grow with the position beyond the trained length."""

from collections.abc import Mapping
from dataclasses import replace

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.rope_config import read_rope
from xorl.core.models.spec import ModelSpec
from xorl.core.nn.attention import Temperature

ARCHITECTURE = "Ministral3ForCausalLM"
DEFAULT_ROPE: Mapping[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `llama_4_scaling_beta` says how queries grow."""
    hf = HFConfig(
        values,
        ARCHITECTURE,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        pad_token_id=11,
        rope_parameters=DEFAULT_ROPE,
    )
    scaling = hf.nested("rope_parameters")
    beta, length = scaling.get("llama_4_scaling_beta", float, 0.0), hf.positive("max_position_embeddings")
    temperature = Temperature(beta, scaling.positive("original_max_position_embeddings")) if beta else None
    config = rotary_gated.read_config(
        hf,
        rope=read_rope(hf, length, read=("llama_4_scaling_beta", "max_position_embeddings")),
        windows=rotary_gated.read_uniform_windows(hf),
    )
    hf.finish()
    return config.with_layers(lambda _, layer: replace(layer, mixer=replace(layer.attention, temperature=temperature)))


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="ministral3",
    config_from_hf=config_from_hf,
    checkpoint_names=rotary_gated.CHECKPOINT_NAMES,
    adapter_targets=rotary_gated.ADAPTER_TARGETS,
    composites=("Mistral3ForConditionalGeneration",),
)
