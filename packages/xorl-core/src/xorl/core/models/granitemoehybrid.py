"""Granite 4: state spaces and attention, experts beside a block for all tokens or that block alone, and factors."""

import math
from collections.abc import Mapping
from dataclasses import replace

from xorl.core.models import granite, mixtures, rotary_gated, state_spaces
from xorl.core.models.decoder_config import DecoderConfig, DenseConfig, ExpertsConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec
from xorl.core.models.stacks import ExpertNames, ExpertStack
from xorl.core.nn.moe import RouterConfig
from xorl.core.nn.state_space import StateSpaceConfig

ARCHITECTURE = "GraniteMoeHybridForCausalLM"
DEFAULTS: Mapping[str, object] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "num_local_experts": 8,
    "shared_intermediate_size": 1024,
}
# The modules of the block for all tokens, which is alone or beside experts.
SHARED: Mapping[str, str] = {"gate_up_proj": "shared_mlp.input_linear", "down_proj": "shared_mlp.output_linear"}
MODULES: Mapping[str, str] = {
    **state_spaces.module_names("mamba"),
    **{f"{block}.{name}": module for block in ("mlp", "mlp.shared_experts") for name, module in SHARED.items()},
}
EXPERTS = ExpertNames(
    "block_sparse_moe.router.layer",
    "block_sparse_moe.experts.{}",
    *("gate_proj", "up_proj", "down_proj"),
    stack=ExpertStack(
        module="block_sparse_moe.experts",
        gate_up="block_sparse_moe.input_linear.weight",
        down="block_sparse_moe.output_linear.weight",
    ),
)
NO_POSITIONS = "nope"
# A setting of kernels, which does not change the result.
INERT = ("mamba_chunk_size",)


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. Without experts, the block for all tokens is the only one."""
    hf = HFConfig(values, ARCHITECTURE, **DEFAULTS)
    num_layers = hf.positive("num_hidden_layers")
    hf.refuse("mamba_proj_bias", "the projections of its state spaces have no biases")
    positions = hf.get("position_embedding_type", str, NO_POSITIONS)
    hf.expect("position_embedding_type", positions, [NO_POSITIONS, "rope"])
    coef = mixtures.read_balance_coef(hf) if hf.get("num_local_experts", int) else 0.0
    config = granite.read_config(hf, ffns=[_read_ffn(hf)] * num_layers, balance_coef=coef)
    states = _read_states(hf, config.hidden_size)
    types = [state_spaces.STATES] * num_layers
    if hf.has("layer_types"):
        types = state_spaces.read_types(hf, "layer_types", (state_spaces.STATES, rotary_gated.FULL))
        hf.expect("number of layer_types", len(types), [num_layers])
    hf.finish(inert=INERT)
    config = config if positions == "rope" else config.with_ropes(None, None)
    return config.with_layers(
        lambda index, layer: replace(layer, mixer=states) if types[index] == state_spaces.STATES else layer
    )


def _read_ffn(hf: HFConfig) -> DenseConfig | ExpertsConfig:
    activation = hf.activation("hidden_act", "silu")
    shared = DenseConfig("gated", hf.positive("shared_intermediate_size"), activation, bias=False)
    if not hf.get("num_local_experts", int):
        for key in ("intermediate_size", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef"):
            hf.has(key)
        return shared
    defaults = ExpertsConfig(8, 2, 11_008, RouterConfig(normalize=True), shared=shared)
    return mixtures.read_experts(hf, "intermediate_size", defaults, "num_local_experts")


def _read_states(hf: HFConfig, hidden_size: int) -> StateSpaceConfig:
    num_heads, width = hf.positive("mamba_n_heads"), hf.positive("mamba_expand") * hidden_size
    # Each group would be normalised alone, which transformers does not do in this family.
    hf.expect("mamba_n_groups", hf.positive("mamba_n_groups"), [1])
    head_dim, rest = divmod(width, num_heads)
    if rest:
        raise ValueError(f"{hf.architecture}: mamba_n_heads: {num_heads} does not divide {width} channels")
    if hf.has("mamba_d_head") and not hf.is_text("mamba_d_head", "auto"):
        hf.expect("mamba_d_head", hf.positive("mamba_d_head"), [head_dim])
    steps = hf.items("time_step_limit", float) if hf.has("time_step_limit") else [0.0, math.inf]
    hf.expect("number of time_step_limit", len(steps), [2])
    return StateSpaceConfig(
        num_heads,
        1,
        head_dim,
        hf.positive("mamba_d_state"),
        hf.positive("mamba_d_conv"),
        conv_bias=hf.get("mamba_conv_bias", bool, True),
        min_step=steps[0],
        max_step=steps[1],
    )


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="granitemoehybrid",
    config_from_hf=config_from_hf,
    checkpoint_names=replace(
        rotary_gated.CHECKPOINT_NAMES, modules=MODULES, stacked=("gate_up_proj",), experts=EXPERTS
    ),
    adapter_targets=("q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj", "input_linear", "output_linear"),
)
