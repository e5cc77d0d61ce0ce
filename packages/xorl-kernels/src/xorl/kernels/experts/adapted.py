"""Experts with low-rank adapters or quantised weights, by grouped products with an explicit backward pass.

The adapters' products are grouped like those of the experts, so no weight is ever merged. The base is frozen: only the
input, the routing weights and the adapters get gradients. Otherwise as `grouped`.

Shapes: T tokens, K experts per token, M rows (T * K, or fewer), D model width, F width of an expert, E experts, S slots
(adapters that are mixed in one pass), R and Q ranks of the adapters of the up and the down projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from xorl.kernels.experts.gates import Gate, some
from xorl.kernels.experts.plan import RoutePlan
from xorl.kernels.experts.products import Products, Rows, adding_products, between_products, products_of
from xorl.kernels.experts.quantized import ExpertsWeight, QuantizedExperts, StoredExperts, num_experts_of


class Factors(NamedTuple):
    """What adapters add to the weights of experts: gate_up[e] + up_b[e] @ up_a[e] and down[e] + down_b[e] @ down_a[e].

    Scales are part of the factors, which have the dtype of the input. A rank of 0 adds nothing. The first dimension of
    a factor is E * S, with the factors of expert e and slot s at e * S + s, or 1 if all experts and slots share one.

    up_a: [E * S, R, D]; a shared one is multiplied with tokens, not with each of their choices.
    up_b: [E * S, 2F, R], the gate's rows first.
    down_a: [E * S, Q, F].
    down_b: [E * S, D, Q]; a shared one is multiplied after the sum over a token's choices.
    x: [T, D], what the adapters of the up projection are applied to if it is not the input itself (dropout).
    kept: probability that an element of the down projection's input is kept for its adapter (dropout).
    num_slots: S. The ids of the call then are those of an expert and a slot, e * S + s; E * S or more for a choice
        without an expert.
    """

    up_a: Tensor
    up_b: Tensor
    down_a: Tensor
    down_b: Tensor
    x: Tensor | None = None
    kept: float = 1.0
    num_slots: int = 1


def no_factors(x: Tensor, gate_up: ExpertsWeight, gate: Gate) -> Factors:
    """Factors of rank 0 for the input x [T, D] and weights of these sizes."""
    if isinstance(gate_up, QuantizedExperts):
        num_experts, num_outputs = gate_up.num_experts, gate_up.num_rows // gate_up.num_experts
    else:
        num_experts, num_outputs = gate_up.shape[:2]
    width = x.shape[1]
    sizes = (0, width), (num_outputs, 0), (0, num_outputs // gate.num_parts), (width, 0)
    up_a, up_b, down_a, down_b = (x.new_empty(num_experts, *size) for size in sizes)
    return Factors(up_a, up_b, down_a, down_b)


def adapted_experts(
    x: Tensor,
    gate_up: ExpertsWeight,
    down: ExpertsWeight,
    weights: Tensor,
    ids: Tensor,
    num_real: Tensor | None,
    factors: Factors,
    up_biases: Tensor,
    *,
    num_rows: int | None,
    num_passes: int,
    recompute: bool,
    products: str,
    gate: Gate,
) -> Tensor:
    """As `grouped.experts`, with adapters, but without the biases of the down projection; [T, D].

    up_biases: [E, 2F], or empty.
    """
    num_experts = num_experts_of(gate_up)
    plan = RoutePlan.of(ids, num_experts * factors.num_slots, num_real, num_rows)
    stored = StoredExperts.of(gate_up), StoredExperts.of(down)
    out = None
    for part in plan.parts(num_passes):
        # After the first part, which is empty only if all are, there is mostly nothing to keep.
        again = recompute or out is not None
        y = _adapted_part(
            x, stored, weights, part, num_experts, factors, up_biases, recompute=again, products=products, gate=gate
        )
        out = y if out is None else out + y
    assert out is not None, "there is at least one part"
    return out


def _adapted_part(
    x: Tensor,
    stored: tuple[StoredExperts, StoredExperts],
    weights: Tensor,
    plan: RoutePlan,
    num_experts: int,
    factors: Factors,
    up_biases: Tensor,
    *,
    recompute: bool,
    products: str,
    gate: Gate,
) -> Tensor:
    mask = x.new_empty(0, dtype=torch.bool)
    if factors.kept < 1:
        mask = torch.rand(plan.choices.shape[0], factors.down_a.shape[2], device=x.device) < factors.kept
    out, *_ = _adapted(
        x,
        x.new_empty(0) if factors.x is None else factors.x,
        stored[0].tensors,
        stored[1].tensors,
        *factors[:4],
        weights,
        mask,
        *plan,
        up_biases,
        num_experts,
        stored[0].form,
        stored[1].form,
        factors.kept,
        recompute,
        products,
        gate,
    )
    return out


class _Layer:
    """The grouped products of a layer, given what both passes have as arguments."""

    def __init__(
        self,
        x: Tensor,
        x_low: Tensor,
        gate_up: list[Tensor],
        down: list[Tensor],
        factors: tuple[Tensor, Tensor, Tensor, Tensor],
        plan: RoutePlan,
        num_experts: int,
        forms: tuple[str, str],
        products: str,
        gate: Sequence[float],
        up_biases: Tensor,
    ) -> None:
        self._gate, self._up_biases = Gate(*gate), some(up_biases)
        self._by: Products = products_of(products)
        self._by_narrow = adding_products(x)
        self.between = between_products(x)
        self.plan = plan
        self.tokens = plan.choices // plan.rows.shape[1]
        self.up_a, self.up_b, self.down_a, self.down_b = factors
        self.x, self.x_low = x, x_low if x_low.numel() else x
        self._stored = StoredExperts(gate_up, forms[0]), StoredExperts(down, forms[1])
        self._num_experts = num_experts

    def gate_up(self) -> Tensor:
        """[E, 2F, D], dequantised for each call."""
        num_rows = self._num_experts * self.up_b.shape[1]
        return self._stored[0].dense(self._num_experts, num_rows, self.x.dtype)

    def down(self) -> Tensor:
        """[E, D, F], dequantised for each call."""
        return self._stored[1].dense(self._num_experts, self._num_experts * self.x.shape[1], self.x.dtype)

    def gather(self, x: Tensor) -> Rows:
        """The rows [M, ...] of tokens."""
        return self._by.gather(x, self.tokens)

    def product(self, rows: Rows, weight: Tensor) -> Tensor:
        """rows [M, I] times weight [E, I, N] of their experts: [M, N]."""
        return self._by.product(rows, weight, self._ends(weight))

    def low_product(self, rows: Rows, factor: Tensor) -> Tensor:
        """rows [M, I] times factor [G, I, N] of their experts' adapters or of all: [M, N]."""
        return self._by_narrow.product(rows, factor, self._ends(factor))

    def add_low_product(self, out: Tensor, rows: Rows, factor: Tensor) -> None:
        """Add `low_product` to `out` [M, N]."""
        self._by_narrow.add_product(out, rows, factor, self._ends(factor))

    def outer(self, left: Rows, right: Rows, like: Tensor) -> Tensor:
        """The gradient of a factor: left.T @ right for each of the matrices `like` [G, N, K]."""
        return self._by_narrow.outer(left, right, self._ends(like))

    def combine(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """The weighted sum over the choices of each token, [T, ...]."""
        return self.between.combine(rows, weights, self.plan.rows, self.plan.ends)

    def up_low(self) -> Tensor:
        """What the first factors of the up projection's adapters make of x: [M, R], or [T, R] if shared."""
        if not self.up_a.numel():
            return self.x.new_empty(0)
        if is_shared(self.up_a):
            return F.linear(self.x_low, self.up_a[0])
        return self.low_product(self.gather(self.x_low), self.up_a.transpose(1, 2))

    def low_rows(self, low: Tensor) -> Rows:
        """A result of `up_low` as rows [M, R]."""
        return self.gather(low) if is_shared(self.up_a) else Rows(low)

    def up(self, low: Tensor) -> Tensor:
        """[M, 2F], the up product with its adapter, of which `low` is a result of `up_low`."""
        up = self.product(self.gather(self.x), self.gate_up().transpose(1, 2))
        if low.numel():
            self.add_low_product(up, self.low_rows(low), self.up_b.transpose(1, 2))
        return up

    def gated(self, up: Tensor) -> Tensor:
        """The activation [M, F] of the up product [M, 2F], to which the biases are added here."""
        return self.between.gated(up, self._expert_ends(), self._gate, self._up_biases)

    def gated_backward(self, grad: Tensor, up: Tensor, weights: Tensor, grad_weights: Tensor) -> tuple[Tensor, Tensor]:
        """As `rows.gated_backward`."""
        ends, options = self._expert_ends(), (self._gate, self._up_biases)
        return self.between.gated_backward(grad, up, weights, self.plan.choices, ends, grad_weights, *options)

    def _expert_ends(self) -> Tensor:
        return self.plan.ends if self._up_biases is None else self._ends(self._up_biases)

    def down_low(self, inner: Tensor, weights: Tensor) -> Tensor:
        """What the first factors of the down projection's adapters make of inner [M, F].

        [M, Q], or if the second factor is shared the weighted sum over choices [T, Q].
        """
        if not self.down_a.numel():
            return inner.new_empty(0)
        low = self.low_product(Rows(inner), self.down_a.transpose(1, 2))
        return self.combine(low, weights) if is_shared(self.down_b) else low

    def _ends(self, weight: Tensor) -> Tensor:
        # The plan's groups are the slots of each expert, so those of an expert are adjacent, as are all of them.
        ends = self.plan.ends
        step = len(ends) // len(weight)
        return ends if step == 1 else ends[step - 1 :: step].contiguous()


def is_shared(factor: Tensor) -> bool:
    """Whether all experts and slots share this factor."""
    return len(factor) == 1


def _dropped(rows: Tensor, mask: Tensor, kept: float) -> Tensor:
    return torch.where(mask, rows / kept, 0) if mask.numel() else rows


@torch.library.custom_op("xorl::adapted_experts", mutates_args=())
def _adapted(
    x: Tensor,
    x_low: Tensor,
    gate_up: list[Tensor],
    down: list[Tensor],
    up_a: Tensor,
    up_b: Tensor,
    down_a: Tensor,
    down_b: Tensor,
    weights: Tensor,
    mask: Tensor,
    choices: Tensor,
    rows: Tensor,
    ends: Tensor,
    up_biases: Tensor,
    num_experts: int,
    gate_up_form: str,
    down_form: str,
    kept: float,
    recompute: bool,
    products: str,
    gate: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output and what the backward pass needs. `x_low` and `mask` are empty without dropout."""
    if not len(choices):
        zeros = torch.zeros_like(x, memory_format=torch.contiguous_format)
        return zeros, x.new_empty(0), x.new_empty(0), x.new_empty(0)
    factors, plan, forms = (up_a, up_b, down_a, down_b), RoutePlan(choices, rows, ends), (gate_up_form, down_form)
    layer = _Layer(x, x_low, gate_up, down, factors, plan, num_experts, forms, products, gate, up_biases)
    up_low = layer.up_low()
    up = layer.up(up_low)
    inner = layer.gated(up)
    y = layer.product(Rows(inner), layer.down().transpose(1, 2))
    down_low = layer.down_low(_dropped(inner, mask, kept), weights)
    if down_low.numel() and not is_shared(down_b):
        layer.add_low_product(y, Rows(down_low), down_b.transpose(1, 2))
    out = layer.combine(y, weights)
    if down_low.numel() and is_shared(down_b):
        out.addmm_(down_low, down_b[0].t())
    return out, x.new_empty(0) if recompute else up, up_low, down_low


@_adapted.register_fake
def _(
    x: Tensor,
    x_low: Tensor,
    gate_up: list[Tensor],
    down: list[Tensor],
    up_a: Tensor,
    up_b: Tensor,
    down_a: Tensor,
    down_b: Tensor,
    weights: Tensor,
    mask: Tensor,
    choices: Tensor,
    rows: Tensor,
    ends: Tensor,
    up_biases: Tensor,
    num_experts: int,
    gate_up_form: str,
    down_form: str,
    kept: float,
    recompute: bool,
    products: str,
    gate: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows = choices.shape[0]
    up = x.new_empty(0) if recompute else x.new_empty(num_rows, up_b.shape[1])
    lows = [
        x.new_empty(x.shape[0] if is_shared(outer) else num_rows, rank) if rank else x.new_empty(0)
        for outer, rank in ((up_a, up_a.shape[1]), (down_b, down_a.shape[1]))
    ]
    return torch.empty_like(x, memory_format=torch.contiguous_format), up, lows[0], lows[1]


@torch.library.custom_op("xorl::adapted_experts_backward", mutates_args=())
def _adapted_backward(
    grad: Tensor,
    x: Tensor,
    x_low: Tensor,
    gate_up: list[Tensor],
    down: list[Tensor],
    up_a: Tensor,
    up_b: Tensor,
    down_a: Tensor,
    down_b: Tensor,
    weights: Tensor,
    mask: Tensor,
    choices: Tensor,
    rows: Tensor,
    ends: Tensor,
    up_biases: Tensor,
    up: Tensor,
    up_low: Tensor,
    down_low: Tensor,
    num_experts: int,
    gate_up_form: str,
    down_form: str,
    kept: float,
    products: str,
    gate: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, x_low (empty if that is), the four factors and the weights."""
    if not len(choices):
        given = (x, x_low, up_a, up_b, down_a, down_b, weights)
        zeros = [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in given]
        return zeros[0], zeros[1], zeros[2], zeros[3], zeros[4], zeros[5], zeros[6]
    factors, plan, forms = (up_a, up_b, down_a, down_b), RoutePlan(choices, rows, ends), (gate_up_form, down_form)
    layer = _Layer(x, x_low, gate_up, down, factors, plan, num_experts, forms, products, gate, up_biases)
    if not up.numel():
        up_low = layer.up_low()
        up = layer.up(up_low)
        if down_a.numel():
            down_low = layer.down_low(_dropped(layer.gated(up), mask, kept), weights)
    # Before the routing weight: its gradient is the product of these and the experts' inner activations.
    grad_rows = layer.gather(grad)
    grad_inner = layer.product(grad_rows, layer.down())  # [M, F]
    grad_down_low = Rows(x.new_empty(0))  # [M, Q]
    if down_low.numel():
        shared = is_shared(down_b)
        grad_down_low = layer.gather(grad @ down_b[0]) if shared else Rows(layer.low_product(grad_rows, down_b))
        if mask.numel():
            grad_inner += _dropped(layer.low_product(grad_down_low, down_a), mask, kept)
        else:
            layer.add_low_product(grad_inner, grad_down_low, down_a)
    grad_weights = torch.zeros_like(weights, memory_format=torch.contiguous_format)
    grad_up, weighted = layer.gated_backward(grad_inner, up, weights, grad_weights)
    # For a rank of 0 the gradients of factors have no elements.
    grad_up_a, grad_up_b, grad_down_a, grad_down_b = map(torch.empty_like, factors)
    if down_low.numel():
        grad_down_a = layer.outer(grad_down_low, Rows(_dropped(weighted, mask, kept)), down_a)
        if is_shared(down_b):
            grad_down_b = (grad.t() @ down_low)[None]
        else:
            weighted_low = (down_low * weights.flatten()[choices, None]).to(x.dtype)
            grad_down_b = layer.outer(grad_rows, Rows(weighted_low), down_b)
    grad_x = layer.product(Rows(grad_up), layer.gate_up())
    grad_x_low = torch.zeros_like(x_low, memory_format=torch.contiguous_format)
    of_tokens = None  # [T, D], of the input of the adapters
    if up_low.numel():
        grad_up_b = layer.outer(Rows(grad_up), layer.low_rows(up_low), up_b)
        of_low = layer.low_product(Rows(grad_up), up_b)  # [M, R]
        if is_shared(up_a):
            summed = layer.combine(of_low, None)
            grad_up_a = (summed.t() @ layer.x_low)[None]
            of_tokens = summed @ up_a[0]
        else:
            grad_up_a = layer.outer(Rows(of_low), layer.gather(layer.x_low), up_a)
            if x_low.numel():
                of_tokens = layer.combine(layer.low_product(Rows(of_low), up_a), None)
            else:
                layer.add_low_product(grad_x, Rows(of_low), up_a)
    grad_x = layer.combine(grad_x, None)
    if of_tokens is not None and x_low.numel():
        grad_x_low = of_tokens
    elif of_tokens is not None:
        grad_x += of_tokens
    return grad_x, grad_x_low, grad_up_a, grad_up_b, grad_down_a, grad_down_b, grad_weights


@_adapted_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    x_low: Tensor,
    gate_up: list[Tensor],
    down: list[Tensor],
    up_a: Tensor,
    up_b: Tensor,
    down_a: Tensor,
    down_b: Tensor,
    weights: Tensor,
    mask: Tensor,
    choices: Tensor,
    rows: Tensor,
    ends: Tensor,
    up_biases: Tensor,
    up: Tensor,
    up_low: Tensor,
    down_low: Tensor,
    num_experts: int,
    gate_up_form: str,
    down_form: str,
    kept: float,
    products: str,
    gate: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(x_low, memory_format=torch.contiguous_format),
        up_a.new_empty(up_a.shape),
        up_b.new_empty(up_b.shape),
        down_a.new_empty(down_a.shape),
        down_b.new_empty(down_b.shape),
        weights.new_empty(weights.shape),
    )


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    num_stored: tuple[int, int]
    options: tuple[int, str, str, float, str, Sequence[float]]
    has_low: bool
    has_outputs: bool


def _save(ctx: _Context, inputs: tuple, output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, x_low, gate_up, down, *others = inputs
    ctx.num_stored, ctx.has_low = (len(gate_up), len(down)), x_low.numel() > 0
    num_experts, gate_up_form, down_form, kept, recompute, products, gate = inputs[14:]
    ctx.options = num_experts, gate_up_form, down_form, kept, products, gate
    # If the backward pass needs no output, a compiler can leave this operator out of a layer that is recomputed.
    ctx.has_outputs = not recompute
    ctx.save_for_backward(x, x_low, *gate_up, *down, *others[:10], *([] if recompute else output[1:]))
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: _Context, grad: Tensor, *_: Tensor) -> tuple[Tensor | list[None] | None, ...]:
    saved = list(ctx.saved_tensors)  # once: recomputation unpacks them
    of_gate_up, of_down = ctx.num_stored
    middle = 2 + of_gate_up
    outputs = [] if ctx.has_outputs else [saved[0].new_empty(0)] * 3
    grad_x, grad_x_low, *of_factors, grad_weights = _adapted_backward(
        grad.contiguous(),
        *saved[:2],
        saved[2:middle],
        saved[middle : middle + of_down],
        *saved[middle + of_down :],
        *outputs,
        *ctx.options,
    )
    frozen = [None] * of_gate_up, [None] * of_down
    nones = (None,) * 12  # the mask, the plan, the biases and what are no tensors
    return grad_x, grad_x_low if ctx.has_low else None, *frozen, *of_factors, grad_weights, *nones


_adapted.register_autograd(_differentiate, setup_context=_save)
