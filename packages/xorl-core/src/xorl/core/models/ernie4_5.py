"""ERNIE 4.5 (dense): a rotation of neighbouring channels, and biases everywhere or nowhere."""

from collections.abc import Mapping

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec

ARCHITECTURE = "Ernie4_5ForCausalLM"


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `use_bias` applies to all projections."""
    hf = HFConfig(
        values,
        ARCHITECTURE,
        num_key_value_heads=2,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    bias = hf.get("use_bias", bool, False)
    config = rotary_gated.read_config(
        hf,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        interleaved_rope=True,
    )
    hf.finish(fixed={"compression_ratio": 1.0, "use_rmsnorm": True})
    return config


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="ernie4_5",
    config_from_hf=config_from_hf,
    checkpoint_names=rotary_gated.CHECKPOINT_NAMES,
    adapter_targets=rotary_gated.ADAPTER_TARGETS,
)
