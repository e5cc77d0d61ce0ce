"""gpt-oss: heads with sinks, windows in every other layer; clamped experts with biases, which files stack."""

from collections.abc import Mapping
from dataclasses import replace

from xorl.core.models import mixtures, rotary_gated
from xorl.core.models.decoder_config import DecoderConfig, ExpertsConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec
from xorl.core.models.stacks import ExpertNames, ExpertStack
from xorl.core.nn.moe import RouterConfig
from xorl.kernels.experts.gates import Gate

ARCHITECTURE = "GptOssForCausalLM"
DEFAULTS: Mapping[str, object] = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
# The softmax of the logits of the chosen experts.
ROUTER = RouterConfig(normalize=True, bias=True)
EXPERT_NAMES = ExpertNames(
    "mlp.router",
    "mlp.experts.{}",
    "gate_proj",
    "up_proj",
    "down_proj",
    stack=ExpertStack(is_transposed=True, alternates=True),
)
# Keys that only the original code reads, with the values for which transformers computes the same.
INERT = ("experts_per_token", "initial_context_length")


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `swiglu_limit` bounds what experts multiply; by default, even layers have a window."""
    hf = HFConfig(values, ARCHITECTURE, **DEFAULTS)
    bias = hf.get("attention_bias", bool, True)
    gate = Gate(hf.above_zero("swiglu_alpha", 1.702), limit=hf.above_zero("swiglu_limit", 7.0), offset=1.0)
    defaults = ExpertsConfig(128, 4, 2880, ROUTER, gate, bias=True)
    experts = mixtures.read_experts(hf, "intermediate_size", defaults, "num_local_experts")
    num_layers, has_windows = hf.positive("num_hidden_layers"), hf.has("sliding_window")
    pattern = [
        rotary_gated.FULL if index % 2 or not has_windows else rotary_gated.SLIDING for index in range(num_layers)
    ]
    config = rotary_gated.read_config(
        hf,
        qkv_bias=bias,
        o_bias=bias,
        windows=rotary_gated.windows_of(hf, pattern),
        ffns=[experts] * num_layers,
        balance_coef=mixtures.read_balance_coef(hf),
    )
    hf.finish(inert=INERT)
    return config.with_layers(lambda _, layer: replace(layer, mixer=replace(layer.attention, sinks=True)))


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="gpt_oss",
    config_from_hf=config_from_hf,
    checkpoint_names=replace(rotary_gated.CHECKPOINT_NAMES, experts=EXPERT_NAMES),
    adapter_targets=mixtures.ADAPTER_TARGETS,
)
