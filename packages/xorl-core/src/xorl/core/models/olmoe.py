"""OLMoE: RMS norms of all queries and of all keys; every layer is a mixture of experts."""

from collections.abc import Mapping
from dataclasses import replace

from xorl.core.models import mixtures, rotary_gated
from xorl.core.models.decoder_config import DecoderConfig, ExpertsConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec
from xorl.core.nn.moe import RouterConfig

ARCHITECTURE = "OlmoeForCausalLM"


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `attention_bias` applies to all four projections; `clip_qkv` bounds three of them."""
    hf = HFConfig(values, ARCHITECTURE, rms_norm_eps=1e-5, pad_token_id=1, router_aux_loss_coef=0.01)
    bias = hf.get("attention_bias", bool, False)
    router = RouterConfig(normalize=hf.get("norm_topk_prob", bool, False))
    experts = mixtures.read_experts(hf, "intermediate_size", ExpertsConfig(64, 8, 2048, router))
    config = rotary_gated.read_config(
        hf,
        qk_norm="whole",
        qkv_bias=bias,
        o_bias=bias,
        ffns=[experts] * hf.positive("num_hidden_layers"),
        balance_coef=mixtures.read_balance_coef(hf),
    )
    clip = hf.cap("clip_qkv")
    hf.finish()
    return config.with_layers(lambda _, layer: replace(layer, mixer=replace(layer.attention, clip=clip)))


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="olmoe",
    config_from_hf=config_from_hf,
    checkpoint_names=rotary_gated.CHECKPOINT_NAMES,
    adapter_targets=mixtures.ADAPTER_TARGETS,
)
