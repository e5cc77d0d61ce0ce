"""Arcee (AFM): a plain feed-forward block with squared ReLU instead of a gated one."""

from collections.abc import Mapping

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig, DenseConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec

ARCHITECTURE = "ArceeForCausalLM"


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json."""
    hf = HFConfig(values, ARCHITECTURE, rms_norm_eps=1e-5)
    bias = hf.get("attention_bias", bool, False)
    ffn = DenseConfig(
        "plain",
        hf.positive("intermediate_size"),
        hf.activation("hidden_act", "relu2"),
        bias=hf.get("mlp_bias", bool, False),
    )
    config = rotary_gated.read_config(hf, qkv_bias=bias, o_bias=bias, ffns=[ffn] * hf.positive("num_hidden_layers"))
    hf.finish()
    return config


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="arcee",
    config_from_hf=config_from_hf,
    checkpoint_names=rotary_gated.CHECKPOINT_NAMES,
    adapter_targets=("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
)
