"""Mixtures of experts: a router sends each token to a few experts and weights their outputs.

Shapes: T tokens, D model width, E experts, K experts per token, F width of an expert, N documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xorl.core.nn.all_gather import AllGather, GatherPlan
from xorl.core.nn.gathered_experts import gathered_experts, graph_bytes
from xorl.core.nn.kernels import LayerKernels
from xorl.core.nn.layers import Linear
from xorl.core.nn.norms import NormConfig, make_norm, unweighted_norm
from xorl.core.nn.roles import Role
from xorl.core.nn.share import Share
from xorl.kernels.arguments import check_choice
from xorl.kernels.experts import ExpertsFn, products_name
from xorl.kernels.experts.adapted import Factors
from xorl.kernels.experts.gates import SILU, Biases, Gate
from xorl.kernels.experts.quantized import ExpertsWeight
from xorl.kernels.experts.routing import (
    Routing,
    count_replayed,
    in_best_groups,
    replay_experts,
    sum_routing,
    top_experts,
)
from xorl.kernels.layout import SequenceLayout

Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class RouterConfig:
    """How tokens choose their experts, and how the outputs of these are weighted.

    Attributes:
        normalize: divide the scores of a token's experts by their sum, plus `eps`.
        scores: the function of the logits that gives the scores. Softmax scores that are normalised are the softmax of
            the logits of the chosen experts alone.
        bias: whether the logits have a bias, which is trained.
        corrected: whether a correction, which is not trained, is added to the scores for the choice alone
            (arXiv:2408.15664).
        num_groups, num_active_groups: a token chooses from the best of so many groups of equal size.
        scaling_factor: the factor on the weights, after they are normalised.
        scaled_eps: None; or there are trained factors on the input's channels and on the weights by expert, and the
            input is normalised first, with this eps, and divided by the root of its width.
    """

    normalize: bool
    scores: Scores = "softmax"
    bias: bool = False
    corrected: bool = False
    num_groups: int = 1
    num_active_groups: int = 1
    eps: float = 0.0
    scaling_factor: float = 1.0
    scaled_eps: float | None = None

    def __post_init__(self) -> None:
        check_choice("scores", self.scores, Scores)
        if self.num_active_groups > self.num_groups:
            raise ValueError(f"{self.num_active_groups} active groups, but there are {self.num_groups} groups")

    @property
    def is_grouped(self) -> bool:
        """Whether some groups are left out."""
        return self.num_active_groups < self.num_groups


class RouterScales(nn.Module):
    """The factors of a router on its input's channels [D], and on the weights of each expert [E]."""

    roles: ClassVar[Mapping[str, Role]] = MappingProxyType({"scale": "norm", "per_expert_scale": "norm"})

    def __init__(self, width: int, num_experts: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.empty(width))
        self.per_expert_scale = nn.Parameter(torch.empty(num_experts))

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The input of the router's product, in `dtype`."""
        return unweighted_norm(x.to(dtype), self.eps) * (self.scale.to(x.dtype).to(dtype) * x.shape[-1] ** -0.5)


class Router(nn.Module):
    """Logits [T, E] of the experts, in fp32.

    Attributes:
        fp32: multiply in fp32; False multiplies in the dtype of x and then widens.
        scales: factors on the input and on weights; None: there are none.
    """

    roles: ClassVar[Mapping[str, Role]] = MappingProxyType({"weight": "router", "bias": "bias"})

    def __init__(self, width: int, num_experts: int, *, bias: bool = False, scaled_eps: float | None = None) -> None:
        super().__init__()
        self.fp32 = True
        self.scales = None if scaled_eps is None else RouterScales(width, num_experts, scaled_eps)
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        self.bias = nn.Parameter(torch.empty(num_experts)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        dtype = wide if self.fp32 else x.dtype
        scaled = x.to(dtype) if self.scales is None else self.scales(x, dtype)
        # Round them first, so that fp32 parameters give the same logits as parameters gathered in the dtype of x.
        bias = None if self.bias is None else self.bias.to(x.dtype).to(dtype)
        return F.linear(scaled, self.weight.to(x.dtype).to(dtype), bias).to(wide)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}"


class ExpertLinear(nn.Module):
    """The weights of one projection of the experts `held`, [experts * out, in]: the rows of each are adjacent.

    It has no forward: the kernels multiply with all experts at once. Subclasses that store the weight differently
    override `stacked`.

    Attributes:
        num_experts: of those that this rank holds.
        held: their indices.
        in_features, out_features: of one expert.
        bias: [experts * out], or None.
        shares: the rows of the weight and the bias of all experts, if this rank does not hold them all.
        stored: see `StoresWeight`; empty, except in subclasses with a weight in another format.
    """

    roles: ClassVar[Mapping[str, Role]] = MappingProxyType({"weight": "expert", "bias": "bias"})

    stored: ClassVar[tuple[str, ...]] = ()

    bias: nn.Parameter | None

    def __init__(
        self, num_experts: int, held: range, in_features: int, out_features: int, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.num_experts, self.held = len(held), held
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(len(held) * out_features, in_features))
        self.bias = nn.Parameter(torch.empty(len(held) * out_features)) if bias else None
        rows = ((held.start * out_features, held.stop * out_features),)
        share = Share(num_experts * out_features, rows, divided_over=("ep",))
        self.shares: Mapping[str, Share] = {}
        if len(held) < num_experts:
            self.shares = {"weight": share, "bias": share} if bias else {"weight": share}

    def stacked(self, dtype: torch.dtype) -> ExpertsWeight:
        """[E, out, in] in `dtype`, or what the kernels dequantise."""
        return self.weight.to(dtype).unflatten(0, (self.num_experts, -1))

    def stacked_bias(self, dtype: torch.dtype) -> Tensor | None:
        """[E, out] in `dtype`, or None."""
        return None if self.bias is None else self.bias.to(dtype).unflatten(0, (self.num_experts, -1))

    def extra_repr(self) -> str:
        return f"{self.num_experts} x [{self.out_features}, {self.in_features}]"


class ExpertsAdapterProtocol(Protocol):
    """Adapters on the experts of a layer."""

    def slots(self, x: Tensor) -> tuple[Tensor, int] | None:
        """The slot [T] of each token of x [T, D], if tokens have different adapters, and the number of slots."""
        ...

    def __call__(self, x: Tensor, shared: Mapping[str, Tensor]) -> Factors | None:
        """What the kernel adds for the input x [T, D], given the factors that the experts share; None for nothing."""
        ...


class SharedFactorsProtocol(Protocol):
    """The factors of adapters that all experts of a layer share, on all ranks."""

    def __call__(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The factors by name, in `dtype`."""
        ...


class Experts(nn.Module):
    """The feed-forward blocks of all experts; gate and up are one matrix, with the gate's rows first.

    Attributes:
        gate: the activation.
        adapter: None, or adapters of the experts, whose own weights are frozen then.
        dispatcher: sends tokens to experts on other ranks; None if this rank holds all of them.
        ranks: those that share matrices, though not those of experts.
        recompute: compute gate, up and activation again in the backward pass instead of keeping them.
    """

    adapter: ExpertsAdapterProtocol | None

    def __init__(
        self,
        width: int,
        expert_width: int,
        num_experts: int,
        *,
        kernels: LayerKernels,
        gate: Gate = SILU,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.adapter = None
        self.gate = gate
        self.use_kernel(kernels.experts)
        self.dispatcher = kernels.dispatcher
        self.ranks = kernels.tensor
        self.recompute = False
        held = range(num_experts)
        if self.dispatcher is not None:
            group = self.dispatcher.group
            count = num_experts // group.size
            assert count * group.size == num_experts, "checked before the model is built"
            held = range(group.rank * count, (group.rank + 1) * count)
        self.gate_up_proj = ExpertLinear(num_experts, held, width, gate.num_parts * expert_width, bias=bias)
        self.down_proj = ExpertLinear(num_experts, held, expert_width, width, bias=bias)

    @property
    def stacked_rows(self) -> Mapping[str, Sequence[int]]:
        """By name of each projection that stacks several matrices: the number of rows of each of them."""
        gate_up, down = self.gate_up_proj, self.down_proj
        return {
            "gate_up_proj": (gate_up.out_features // self.gate.num_parts,)
            * (self.gate.num_parts * gate_up.num_experts),
            "down_proj": (down.out_features,) * down.num_experts,
        }

    def use_kernel(self, kernel: ExpertsFn) -> None:
        """Compute with `kernel`."""
        self.kernel, self.products = kernel, products_name(kernel) or ""

    @property
    def is_one_operator(self) -> bool:
        """Whether one operator computes them and exchanges the tokens, if the largest number of tokens is known."""
        is_plain = self.adapter is None and self.gate_up_proj.bias is None and not self.gate_up_proj.stored
        is_gathered = self.recompute and isinstance(self.dispatcher, AllGather)
        return is_gathered and is_plain and self.products != ""

    def groups_of(self, x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, int]:
        """The groups [T, K] of what is computed for tokens x [T, D] with experts `ids`, and the number of groups.

        A group is an expert, or an expert with one of several adapters.
        """
        slots = None if self.adapter is None else self.adapter.slots(x)
        if slots is None:
            return ids, num_experts
        of_tokens, num_slots = slots
        return ids * num_slots + of_tokens[:, None], num_experts * num_slots

    def forward(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        num_real: Tensor | None,
        shared: Mapping[str, Tensor],
        plan: object = None,
    ) -> Tensor:
        """[T, D].

        Args:
            ids: the groups of `groups_of`.
            shared: the factors of adapters that all experts share.
            plan: of the dispatcher for the groups, if there is one.
        """
        if self.dispatcher is None:
            return self._compute(x, weights, ids, num_real, None, shared)
        if self.is_one_operator and isinstance(plan, GatherPlan):
            gate_up, down = self.gate_up_proj.stacked(x.dtype), self.down_proj.stacked(x.dtype)
            assert isinstance(gate_up, Tensor), "quantised experts are not one operator"
            assert isinstance(down, Tensor), "quantised experts are not one operator"
            assert isinstance(self.dispatcher, AllGather), "it made the plan"
            given = x, weights, gate_up, down, self.dispatcher, plan
            return gathered_experts(*given, products=self.products, gate=self.gate)
        x, weights, ids, num_rows, num_passes = self.dispatcher.dispatch(x, weights, plan)
        return self.dispatcher.combine(self._compute(x, weights, ids, None, num_rows, shared, num_passes), plan)

    def _compute(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        num_real: Tensor | None,
        num_rows: int | None,
        shared: Mapping[str, Tensor],
        num_passes: int = 1,
    ) -> Tensor:
        up_biases, down_biases = self.gate_up_proj.stacked_bias(x.dtype), self.down_proj.stacked_bias(x.dtype)
        return self.kernel(
            x,
            self.gate_up_proj.stacked(x.dtype),
            self.down_proj.stacked(x.dtype),
            weights,
            ids,
            num_real,
            num_rows=num_rows,
            num_passes=num_passes,
            gate=self.gate,
            biases=None if up_biases is None or down_biases is None else Biases(up_biases, down_biases),
            recompute=self.recompute,
            factors=None if self.adapter is None else self.adapter(x, shared),
        )


class LayerRoutes(NamedTuple):
    """Where one layer sent its tokens.

    ids: [T, K] int64, the experts of each token.
    sums: the input of the router losses, in training.
    replayed: [N, 2] int32 (`count_replayed`), in training with recorded experts.
    """

    ids: Tensor
    sums: Routing | None
    replayed: Tensor | None


class MixtureOfExperts(nn.Module):
    """For each token, the sum of weight * expert(x) over the K experts that its router chooses, plus shared experts.

    Args:
        width: D.
        expert_width: F.
        num_experts, num_active: E and K.
        gate: the activation of experts.
        bias: whether their matrices have biases.
        own_norm: of the experts and of the shared block.
        latent_width, latent_bias: see `latent_in`.

    Attributes:
        router: how experts are chosen and weighted.
        correction: [E] in fp32, what is added to scores for the choice; None for nothing. It is never trained, and not
            a part of the router, of which it therefore does not share the flags.
        shared_experts: a block that computes every token; None: there is none.
        shared_expert_gate: its output is multiplied by the sigmoid of this router's logit; None: it is not.
        experts_input_norm, experts_output_norm, shared_output_norm: norms of the experts' input, of their sum, and of
            the shared block's output; None: there are none. With these, the router and the experts take the input
            before its norm, `residual`, of which the shared block takes the normed one.
        latent_in, latent_out: the projections to what the experts compute on, which is narrower, and back from their
            sum; None: they compute on the input itself.
        shared_factors: of adapters, what all experts share; None if they share nothing. It is beside the experts, not
            part of them, because ranks that hold different experts all have it.
    """

    roles: ClassVar[Mapping[str, Role]] = MappingProxyType({"correction": "correction"})

    shared_factors: SharedFactorsProtocol | None

    def __init__(
        self,
        width: int,
        expert_width: int,
        *,
        num_experts: int,
        num_active: int,
        router: RouterConfig,
        kernels: LayerKernels,
        gate: Gate = SILU,
        bias: bool = False,
        shared: nn.Module | None = None,
        shared_gate: bool = False,
        own_norm: NormConfig | None = None,
        latent_width: int | None = None,
        latent_bias: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.num_active = num_active
        self.router = router
        self.gate = Router(width, num_experts, bias=router.bias, scaled_eps=router.scaled_eps)
        self.correction = None
        if router.corrected:
            self.correction = nn.Parameter(torch.empty(num_experts, dtype=torch.float32), requires_grad=False)
        inner = width if latent_width is None else latent_width
        self.experts = Experts(inner, expert_width, num_experts, kernels=kernels, gate=gate, bias=bias)
        self.latent_in = None if latent_width is None else Linear(width, inner, bias=latent_bias)
        self.latent_out = None if latent_width is None else Linear(inner, width, bias=latent_bias)
        self.shared_experts = shared
        self.shared_expert_gate = Router(width, 1) if shared_gate else None
        self.shared_factors = None
        self.experts_input_norm, self.experts_output_norm, self.shared_output_norm = (
            None if own_norm is None else make_norm(width, own_norm, kernels) for _ in range(3)
        )

    def forward(
        self, x: Tensor, layout: SequenceLayout, recorded: Tensor | None = None, residual: Tensor | None = None
    ) -> tuple[Tensor, LayerRoutes]:
        """Returns the output [T, D], to which experts add 0 for padding, and the routes.

        x, residual: the input after the norm of the layer, and before it.

        recorded: [T, K] integers, the experts to send tokens to, all different; -1 for tokens that choose themselves.
        """
        chosen_by = routed = x
        if self.experts_input_norm is not None:
            assert residual is not None, "norms of their own replace that of the layer"
            chosen_by, (_, routed) = residual, self.experts_input_norm(residual)
        logits = self.gate(chosen_by)
        scores = logits.softmax(-1) if self.router.scores == "softmax" else logits.sigmoid()
        ids = own = self._choose(scores.detach())
        if recorded is not None:
            ids = replay_experts(own, recorded)
        if self.latent_in is not None:
            routed = self.latent_in(routed)
        groups, num_groups = self.experts.groups_of(routed, ids, self.num_experts)
        dispatcher = self.experts.dispatcher
        # The host may wait for the numbers of a plan, so it is begun early.
        plan = None
        if dispatcher is not None:
            plan = dispatcher.plan(groups, num_groups, layout.num_real, layout.most_tokens)
        weights = self._weights(scores.gather(-1, ids), ids, x.dtype)
        shared = {} if self.shared_factors is None else self.shared_factors(x.dtype)
        if dispatcher is None or not dispatcher.returns_late:
            routes = self._routes(logits, scores, ids, own, recorded, layout)
            out = self.experts(routed, weights, groups, layout.num_real, shared, plan)
            return self._with_shared(out, self._of_shared_experts(x)), routes
        out = self.experts(routed, weights, groups, layout.num_real, shared, plan)
        # While the output is on its way:
        routes = self._routes(logits, scores, ids, own, recorded, layout)
        beside = self._of_shared_experts(x)
        dispatcher.wait(plan)
        return self._with_shared(out, beside), routes

    def graph_bytes(self, num_tokens: int) -> int:
        """Memory of CUDA graphs of the experts, if the rank that has most has so many tokens."""
        experts = self.experts
        if not experts.is_one_operator:
            return 0
        assert experts.dispatcher is not None, "one operator needs other ranks"
        weights = experts.gate_up_proj.weight, experts.down_proj.weight
        return graph_bytes(num_tokens, self.num_active, experts.dispatcher.group.size, *weights)

    def _with_shared(self, out: Tensor, shared: Tensor | None) -> Tensor:
        """The sum of the experts' output and that of the shared block, if there is one."""
        if self.latent_out is not None:
            out = self.latent_out(out)
        if self.experts_output_norm is not None:
            _, out = self.experts_output_norm(out)
        return out if shared is None else out + shared

    def _choose(self, scores: Tensor) -> Tensor:
        """The experts [T, K] of each token, by scores [T, E]."""
        if self.correction is not None:
            scores = scores + self.correction
        if self.router.is_grouped:
            scores = in_best_groups(scores, self.router.num_groups, self.router.num_active_groups)
        return top_experts(scores, self.num_active)

    def _weights(self, scores: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights [T, K] of the chosen experts, by their scores. dtype: of the input, to which factors round."""
        router = self.router
        if router.normalize:
            total = scores.sum(-1, keepdim=True)
            scores = scores / (total + router.eps if router.eps else total)
        if self.gate.scales is not None:
            scores = scores * self.gate.scales.per_expert_scale.to(dtype).to(scores.dtype)[ids]
        return scores if router.scaling_factor == 1.0 else scores * router.scaling_factor

    def _of_shared_experts(self, x: Tensor) -> Tensor | None:
        if self.shared_experts is None:
            return None
        out = self.shared_experts(x)
        if self.shared_output_norm is not None:
            _, out = self.shared_output_norm(out)
        return out if self.shared_expert_gate is None else self.shared_expert_gate(x).sigmoid().to(x.dtype) * out

    def _routes(
        self,
        logits: Tensor,
        scores: Tensor,
        ids: Tensor,
        own: Tensor,
        recorded: Tensor | None,
        layout: SequenceLayout,
    ) -> LayerRoutes:
        if not self.training:
            return LayerRoutes(ids, None, None)
        place = layout.cu_seqlens, layout.num_real
        replayed = None if recorded is None else count_replayed(own, recorded, *place)
        # The losses take the softmax of the logits, whatever the scores are, as transformers does.
        probabilities = scores if self.router.scores == "softmax" else logits.softmax(-1)
        return LayerRoutes(ids, sum_routing(logits, probabilities, ids, *place), replayed)
