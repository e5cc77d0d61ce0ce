"""Qwen3-Next: gated delta nets, whose projections are stacked by key head; experts, and a shared one with a gate."""

from collections.abc import Mapping

from xorl.core.models import delta_nets, mixtures
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec

ARCHITECTURE = "Qwen3NextForCausalLM"
DEFAULTS: Mapping[str, object] = {"num_key_value_heads": 2}


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json."""
    hf = HFConfig(values, ARCHITECTURE, **delta_nets.DEFAULTS, **DEFAULTS)
    normalize = hf.get("norm_topk_prob", bool, True)
    experts = mixtures.read_experts_beside_gated(hf, 512, 10, width=512, shared_width=512, normalize=normalize)
    ffns = mixtures.read_ffns(hf, experts, mixtures.read_sparse_layers(hf))
    coef = mixtures.read_balance_coef(hf)
    return delta_nets.read_config(hf, ffns, by_key_head=True, balance_coef=coef, inert=["intermediate_size"])


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="qwen3_next",
    config_from_hf=config_from_hf,
    checkpoint_names=delta_nets.NAMES_WITH_SHARED_EXPERTS,
    adapter_targets=delta_nets.ADAPTER_TARGETS,
)
