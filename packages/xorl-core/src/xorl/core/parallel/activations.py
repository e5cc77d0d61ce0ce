"""Recomputation: what of a layer runs again in the backward pass instead of being kept from the forward pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from xorl.core.nn.layers import GatedMLP

RecomputeModule = Literal["self_attn", "mlp"]
Recompute = Literal["none", "operation", "layer"] | Sequence[RecomputeModule]
"""none; operation keeps the outputs of matrix products and attention; layer keeps the input alone; or submodules."""

aten = torch.ops.aten
# What takes most of the time for the bytes it returns. Linear layers reach the dispatcher as mm and addmm.
KEPT_OPERATIONS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.linear.default,
        aten._scaled_mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
# What an adapter adds to a layer's output is a product over its rank, which is far below the output's width.
LOW_RANK_RATIO = 16
# Our own attention operators: xorl::attention_{backend}.
ATTENTION_PREFIX = "xorl::attention_"
# Products with quantised weights.
KEPT_OPERATORS = frozenset({"xorl::quantized_linear"})
# torch reminds everyone of it who compiles what a policy recomputes, and has no option by which to answer. Operators of
# ours that write in place, `xorl::add_product_` and `xorl::swiglu_backward_`, write over what their callers have
# just made, and tests hold their compiled gradients against those of plain code.
REMINDER = "Please make sure the checkpointed region does not contain in-place ops"


def recompute_layers(
    layers: nn.ModuleList,
    recompute: Recompute,
    *,
    num_layers: int | None = None,
    reentrant: bool,
    compiled: bool = False,
) -> None:
    """Let the first `num_layers` (None: all) layers keep less for the backward pass, as `recompute` says; in place.

    Where the layers will be compiled, the gated activation of an MLP is always computed again: it is the widest tensor
    but one, and its input is what the backward pass reads anyway. Code that is not compiled would keep it all the same,
    and `LayerKernels.swiglu_linear` does it beside the gradient.

    Modules get a class with another forward function, so parameters keep their names, hooks of the module stay outside
    of what is recomputed, and the compiler sees that layers are alike. Values and gradients are the same to the bit,
    with the same dropout where there is any; compiled, to rounding, since what is fused is another. `reentrant` is
    torch's older form, for whole layers and modules.
    """
    modules = [] if isinstance(recompute, str) else recompute
    first = layers[:num_layers]
    if compiled:
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_no_reminder)
        # Not within what is computed again as a whole: torch keeps the inputs of a part that is marked twice.
        is_within = recompute in ("layer", "operation") or "mlp" in modules
        others = layers[len(first) :] if is_within else layers
        for mlp in [module for module in others.modules() if isinstance(module, GatedMLP)]:
            mlp.gated = _recomputed(mlp.gated)
    if recompute == "none":
        return
    is_selective = recompute == "operation"
    assert not (is_selective and reentrant), "the reentrant form cannot keep anything"
    for layer in first:
        for module in [layer.get_submodule(name) for name in modules] or [layer]:
            # Saving the generators' state costs time, and without dropout nothing in a layer draws random numbers.
            draws = any(isinstance(inner, nn.Dropout) for inner in module.modules())
            module.__class__ = _recomputing(type(module), reentrant, is_selective, draws)


@cache
def _recomputing(kind: type[nn.Module], reentrant: bool, is_selective: bool, draws: bool) -> type[nn.Module]:
    """`kind`, by the same name, with a forward function that runs again in the backward pass."""
    plain = kind.forward

    def whole(self: nn.Module, *inputs: object) -> object:
        if torch.compiler.is_compiling():
            # Told by a policy, torch sees what autograd functions do inside, and would keep it otherwise.
            return checkpoint(
                plain, self, *inputs, use_reentrant=False, preserve_rng_state=draws, context_fn=_no_kept_operations
            )
        return checkpoint(plain, self, *inputs, use_reentrant=reentrant, preserve_rng_state=draws)

    def selective(self: nn.Module, *inputs: object) -> object:
        return checkpoint(
            plain, self, *inputs, use_reentrant=False, preserve_rng_state=draws, context_fn=_kept_operations
        )

    recomputed = selective if is_selective else whole

    def forward(self: nn.Module, *inputs: object) -> object:
        # Without a gradient there is nothing to keep, and the reentrant form would warn that there will be none.
        return recomputed(self, *inputs) if torch.is_grad_enabled() else plain(self, *inputs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


@cache
def _recomputed(gated: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`gated`, one and the same for all layers, whose result compiled code does not keep for the product after it."""

    def call(gate_up: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(gated, gate_up, use_reentrant=False, preserve_rng_state=False))

    return call


def _is_low_rank(operation: object, args: Sequence[object]) -> bool:
    """Whether a matrix product has so few multiply-adds for what it returns that it is made again in no time."""
    if operation not in (aten.mm.default, aten.addmm.default):
        return False
    *_, left, right = args
    assert isinstance(left, Tensor)
    assert isinstance(right, Tensor)
    return left.shape[1] * LOW_RANK_RATIO < right.shape[1]


def _is_no_reminder(record: logging.LogRecord) -> bool:
    return REMINDER not in record.getMessage()


def _kept_operations() -> tuple:
    return create_selective_checkpoint_contexts(_is_kept)


def _no_kept_operations() -> tuple:
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)


def _is_kept(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    if operation in KEPT_OPERATIONS:
        return CheckpointPolicy.PREFER_RECOMPUTE if _is_low_rank(operation, args) else CheckpointPolicy.MUST_SAVE
    name = operation.name() if isinstance(operation, torch._ops.OpOverload) else ""
    is_attention = name.startswith(ATTENTION_PREFIX) and not name.endswith("_backward")
    is_kept = is_attention or name in KEPT_OPERATORS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
