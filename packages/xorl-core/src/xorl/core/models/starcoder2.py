"""StarCoder 2: layer norms with biases, a plain feed-forward block, and one sliding window for all layers, or none."""

from collections.abc import Mapping
from dataclasses import replace

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig, DenseConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec
from xorl.core.nn import NormConfig

ARCHITECTURE = "Starcoder2ForCausalLM"
# Keys of released models that transformers does not read.
INERT = (
    "activation_function",
    "attention_softmax_in_fp32",
    "layer_norm_epsilon",
    "scale_attention_softmax_in_fp32",
)
CHECKPOINT_NAMES = replace(
    rotary_gated.CHECKPOINT_NAMES, modules={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
)


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `use_bias` applies to all projections."""
    hf = HFConfig(values, ARCHITECTURE, num_key_value_heads=2, initializer_range=0.018042, tie_word_embeddings=True)
    bias = hf.get("use_bias", bool, True)
    activation = hf.activation("hidden_act", "gelu_pytorch_tanh")
    ffn = DenseConfig("plain", hf.positive("intermediate_size"), activation, bias)
    config = rotary_gated.read_config(
        hf,
        qkv_bias=bias,
        o_bias=bias,
        norm=NormConfig("layer", hf.get("norm_epsilon", float, 1e-5), bias=True),
        windows=rotary_gated.read_uniform_windows(hf),
        ffns=[ffn] * hf.positive("num_hidden_layers"),
    )
    hf.finish(inert=INERT, fixed={"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True})
    return config


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="starcoder2",
    config_from_hf=config_from_hf,
    checkpoint_names=CHECKPOINT_NAMES,
    adapter_targets=("q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"),
)
