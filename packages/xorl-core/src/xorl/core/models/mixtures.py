"""Config keys and names shared by families of mixtures of experts."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DenseConfig, ExpertsConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.nn.layers import SWIGLU_ACTIVATIONS
from xorl.core.nn.moe import RouterConfig

ADAPTER_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
DEFAULT_BALANCE_COEF = 0.001
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Of routers with grouped experts; it is added to the sum by which scores are divided.
_EPS = 1e-20


def shared_names(module: str) -> Mapping[str, str]:
    """The names of the decoder's shared experts, for families that have them under `module`, relative to the layer."""
    return MappingProxyType({f"mlp.shared_experts.{name}": f"{module}.{name}" for name in _PROJECTIONS})


def read_experts(
    hf: HFConfig, width_key: str, defaults: ExpertsConfig, count_key: str = "num_experts"
) -> ExpertsConfig:
    """A mixture of experts. `hidden_act` must be silu; another activation is the `gate` of `defaults`.

    The number of experts is `count_key`, or `num_local_experts`, which transformers 5 writes for most families. Missing
    keys are taken from `defaults`, and so is everything else.
    """
    hf.expect("hidden_act", hf.get("hidden_act", str, "silu"), SWIGLU_ACTIVATIONS)
    count_key = count_key if hf.has(count_key) else "num_local_experts"
    num_experts = hf.positive(count_key, defaults.num_experts)
    num_active = hf.positive("num_experts_per_tok", defaults.num_active)
    if num_active > num_experts:
        raise ValueError(f"{hf.architecture}: num_experts_per_tok: {num_active} exceeds {count_key}: {num_experts}")
    width = hf.positive(width_key, defaults.width)
    return replace(defaults, num_experts=num_experts, num_active=num_active, width=width)


def read_grouped_experts(hf: HFConfig, defaults: ExpertsConfig) -> ExpertsConfig:
    """Experts whose scores are corrected and grouped for the choice, and shared experts (arXiv:2412.19437, 2.1.2).

    Shared experts are one block, `n_shared_experts` times as wide as an expert. `defaults` has one of each group, and
    no correction.
    """
    router = RouterConfig(
        scores="sigmoid",
        corrected=True,
        normalize=hf.get("norm_topk_prob", bool, defaults.router.normalize),
        eps=_EPS,
        scaling_factor=hf.above_zero("routed_scaling_factor", 1.0),
    )
    experts = read_experts(hf, "moe_intermediate_size", replace(defaults, router=router), "n_routed_experts")
    num_groups, num_active_groups = hf.positive("n_group", 1), hf.positive("topk_group", 1)
    try:
        router = replace(router, num_groups=num_groups, num_active_groups=num_active_groups)
        experts = replace(experts, router=router)
    except ValueError as error:
        raise ValueError(
            f"{hf.architecture}: n_group: {num_groups} and topk_group: {num_active_groups} do not fit: {error}"
        ) from error
    num_shared = hf.get("n_shared_experts", int, 1)
    if num_shared < 0:
        raise ValueError(f"{hf.architecture}: n_shared_experts must be at least 0, got {num_shared}")
    if num_shared == 0:
        return experts
    activation = hf.activation("hidden_act", "silu")
    return replace(experts, shared=DenseConfig("gated", num_shared * experts.width, activation, bias=False))


def read_experts_beside_gated(
    hf: HFConfig, num_experts: int, num_active: int, *, width: int, shared_width: int, normalize: bool
) -> ExpertsConfig:
    """Experts by softmax, and one of `shared_expert_intermediate_size` with a gate that computes every token.

    The numbers are those of missing keys.
    """
    shared_width = hf.positive("shared_expert_intermediate_size", shared_width)
    defaults = ExpertsConfig(
        num_experts,
        num_active,
        width,
        RouterConfig(normalize=normalize),
        shared=DenseConfig("gated", shared_width, hf.activation("hidden_act", "silu"), bias=False),
        shared_gate=True,
    )
    return read_experts(hf, "moe_intermediate_size", defaults)


def read_sparse_layers(hf: HFConfig) -> list[bool]:
    """Whether each layer has experts, from `decoder_sparse_step` and `mlp_only_layers`."""
    num_layers, step = hf.positive("num_hidden_layers"), hf.positive("decoder_sparse_step", 1)
    dense_layers = set(hf.items("mlp_only_layers", int))
    is_sparse = [index not in dense_layers and (index + 1) % step == 0 for index in range(num_layers)]
    if not any(is_sparse):
        raise ValueError(
            f"{hf.architecture}: mlp_only_layers and decoder_sparse_step make every layer dense; use a dense "
            "architecture"
        )
    return is_sparse


def read_ffns(hf: HFConfig, experts: ExpertsConfig, is_sparse: list[bool]) -> list[DenseConfig | ExpertsConfig]:
    """The feed-forward blocks of layers, of which some have experts, and the others blocks of `intermediate_size`."""
    return [experts if sparse else rotary_gated.read_dense(hf) for sparse in is_sparse]


def read_ffns_after_dense(hf: HFConfig, experts: ExpertsConfig, default: int) -> list[DenseConfig | ExpertsConfig]:
    """The feed-forward blocks of layers, of which the first `first_k_dense_replace` have no experts."""
    num_dense = hf.get("first_k_dense_replace", int, default)
    return read_ffns(hf, experts, [index >= num_dense for index in range(hf.positive("num_hidden_layers"))])


def read_balance_coef(hf: HFConfig) -> float:
    """`router_aux_loss_coef` if `output_router_logits` is set: without it, transformers adds no router loss."""
    coef = hf.get("router_aux_loss_coef", float, DEFAULT_BALANCE_COEF)
    return coef if hf.get("output_router_logits", bool, False) else 0.0
