"""Activation recomputation: parts of layers run again in the backward pass instead of keeping their activations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from xorl.core.nn.latent import LatentAttention
from xorl.core.nn.layers import GatedMLP
from xorl.core.nn.moe import Experts, MixtureOfExperts
from xorl.kernels.torch_private import ATTENTION_AND_SCALED_PRODUCTS, SCALED_PRODUCT, OpOverload

RecomputeModule = Literal["self_attn", "mlp"]
Recompute = Literal["none", "operation", "layer"] | Sequence[RecomputeModule]
"""none; operation (keep the outputs of matrix products, attention and recurrences, but latents instead of the heads
projected from them); layer (keep only its input); or submodules, of which self_attn stands for a recurrence, too."""

aten = torch.ops.aten
# The operators that take the most time per byte of output. Linear layers reach the dispatcher as mm and addmm.
KEPT_ATEN_OPERATORS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.linear.default,
        *ATTENTION_AND_SCALED_PRODUCTS,
    }
)
# The inner dimension of an adapter's product is its rank, which is far below the width of the output.
LOW_RANK_RATIO = 16
# The operators of xorl.kernels that mix tokens: xorl::attention_{backend}, and the scans of recurrences.
MIXER_PREFIXES = ("xorl::attention_", "xorl::gated_delta", "xorl::state_space")
# Products with quantised weights, and of experts.
QUANTIZED_PRODUCT = "xorl::quantized_linear"
KEPT_XORL_OPERATORS = frozenset({QUANTIZED_PRODUCT, "xorl::experts", "xorl::adapted_experts"})
OUT_FEATURES_ARGUMENT = 6
# Where the operators of linear layers have the matrix [in, out], or [out, in] for linear.
MATRIX_ARGUMENTS: Mapping[object, int] = MappingProxyType(
    {aten.mm.default: 1, aten.addmm.default: 2, aten.linear.default: 1, SCALED_PRODUCT: 1}
)
# Always kept: a recomputed score may differ in its last bit, which could send the token to other experts.
ROUTING_OPERATOR = "xorl::top_experts"
# torch logs this for every compiled checkpoint with a policy, and has no option to turn it off. Our in-place operators,
# `xorl::add_product_` and `xorl::swiglu_backward_`, only overwrite tensors that their callers just created, and tests
# compare their compiled gradients with those of plain code.
IN_PLACE_REMINDER = "Please make sure the checkpointed region does not contain in-place ops"


def recompute_layers(
    layers: nn.ModuleList,
    recompute: Recompute,
    *,
    num_layers: int | None = None,
    experts: bool = False,
    reentrant: bool,
    compiled: bool = False,
) -> None:
    """Apply activation recomputation to the first `num_layers` (None: all) layers, in place.

    `experts` makes the experts of these layers recompute their gate, up and activation. This saves no memory in a layer
    that is recomputed as a whole, but in compiled code it is done there to save time: as the backward pass then needs
    no output of the experts, the compiler leaves these out of the recomputation, with the down product and what is sent
    to other ranks afterwards.

    If the layers will be compiled, the gated activation of every MLP is recomputed: it is the second-widest tensor, and
    the backward pass reads its input anyway. In uncompiled code this would save nothing, because the next linear layer
    keeps its input. `LayerKernels.swiglu_linear` recomputes the activation together with the gradient.

    The class of each module is replaced by a subclass with another forward function. So parameters keep their names,
    the module's hooks do not run again, and the compiler can share code between layers. Values and gradients are
    bitwise identical, including dropout; in compiled code they agree up to rounding, because operations are fused
    differently. `reentrant` selects torch's older implementation, for whole layers and modules only.
    """
    modules = [] if isinstance(recompute, str) else recompute
    first = layers[:num_layers]
    if compiled:
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_not_reminder)
        # Not inside modules that are recomputed as a whole: torch keeps the inputs of nested checkpoints.
        is_nested = recompute in ("layer", "operation") or "mlp" in modules
        others = layers[len(first) :] if is_nested else layers
        for mlp in [module for module in others.modules() if isinstance(module, GatedMLP)]:
            mlp.gated = _checkpointed(mlp.gated)
    for module in first.modules() if experts or (compiled and recompute == "layer") else ():
        if isinstance(module, Experts):
            module.recompute = True
    if recompute == "none":
        return
    is_selective = recompute == "operation"
    assert not (is_selective and reentrant), "reentrant recomputation cannot be selective"
    for layer in first:
        for module in _parts(layer, modules) if modules else [layer]:
            # Saving the RNG state costs time. In a layer, only dropout uses random numbers.
            has_dropout = any(isinstance(inner, nn.Dropout) for inner in module.modules())
            has_router = any(isinstance(inner, MixtureOfExperts) for inner in module.modules())
            expansions = frozenset(
                (linear.in_features, linear.out_features)
                for inner in module.modules()
                if isinstance(inner, LatentAttention)
                for linear in inner.expansions
            )
            module.__class__ = _recomputing_class(
                type(module), reentrant, is_selective, has_dropout, has_router, expansions
            )


def _parts(layer: nn.Module, names: Sequence[RecomputeModule]) -> list[nn.Module]:
    """The submodules of these names that the layer has; its recurrence stands for self_attn."""
    children = dict(layer.named_children())
    found = [children.get("linear_attn" if name == "self_attn" and name not in children else name) for name in names]
    return [module for module in found if module is not None]


@cache
def _recomputing_class(
    kind: type[nn.Module],
    reentrant: bool,
    is_selective: bool,
    has_dropout: bool,
    has_router: bool,
    expansions: frozenset[tuple[int, int]],
) -> type[nn.Module]:
    """A subclass of `kind`, of the same name, whose forward function is recomputed in the backward pass.

    expansions: the input and output features of products that are recomputed although others are kept. Operators do
    not know the module that calls them; another product of these features is recomputed, too.
    """
    plain = kind.forward
    policy = partial(_selective_policy, expansions)

    def selective_contexts() -> tuple:
        return create_selective_checkpoint_contexts(policy)

    def whole(self: nn.Module, *inputs: object) -> object:
        if has_router or torch.compiler.is_compiling():
            # Without a policy, the compiler would keep the intermediate tensors of autograd functions.
            return checkpoint(
                plain, self, *inputs, use_reentrant=False, preserve_rng_state=has_dropout, context_fn=_routing_contexts
            )
        return checkpoint(plain, self, *inputs, use_reentrant=reentrant, preserve_rng_state=has_dropout)

    def selective(self: nn.Module, *inputs: object) -> object:
        return checkpoint(
            plain, self, *inputs, use_reentrant=False, preserve_rng_state=has_dropout, context_fn=selective_contexts
        )

    recomputed = selective if is_selective else whole

    def forward(self: nn.Module, *inputs: object) -> object:
        # Without gradients nothing is kept, and reentrant checkpointing would warn about inputs without gradients.
        return recomputed(self, *inputs) if torch.is_grad_enabled() else plain(self, *inputs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


@cache
def _checkpointed(gated: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`gated` with its result recomputed in compiled code. Cached, so that all layers share one function."""

    def call(gate_up: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(gated, gate_up, use_reentrant=False, preserve_rng_state=False))

    return call


def _is_low_rank(operation: object, args: Sequence[object]) -> bool:
    """Whether a matrix product has so few multiply-adds per output that recomputing it is cheap."""
    if operation not in (aten.mm.default, aten.addmm.default):
        return False
    *_, left, right = args
    assert isinstance(left, Tensor)
    assert isinstance(right, Tensor)
    return left.shape[1] * LOW_RANK_RATIO < right.shape[1]


def _features(operation: object, name: str, args: Sequence[object]) -> tuple[int, int] | None:
    """The input and output features of a product; None for other operators."""
    if name == QUANTIZED_PRODUCT:
        x, out_features = args[0], args[OUT_FEATURES_ARGUMENT]
        assert isinstance(x, Tensor)
        assert isinstance(out_features, int)
        return x.shape[-1], out_features
    place = MATRIX_ARGUMENTS.get(operation)
    if place is None:
        return None
    matrix = args[place]
    assert isinstance(matrix, Tensor)
    return (
        (matrix.shape[1], matrix.shape[0]) if operation == aten.linear.default else (matrix.shape[0], matrix.shape[1])
    )


def _is_not_reminder(record: logging.LogRecord) -> bool:
    return IN_PLACE_REMINDER not in record.getMessage()


def _routing_contexts() -> tuple:
    return create_selective_checkpoint_contexts(_routing_policy)


def _routing_policy(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    is_routing = isinstance(operation, OpOverload) and operation.name() == ROUTING_OPERATOR
    return CheckpointPolicy.MUST_SAVE if is_routing else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_policy(
    expansions: frozenset[tuple[int, int]], context: object, operation: object, *args: object, **kwargs: object
) -> CheckpointPolicy:
    name = operation.name() if isinstance(operation, OpOverload) else ""
    is_mixer = name.startswith(MIXER_PREFIXES) and not name.endswith("_backward")
    is_kept = operation in KEPT_ATEN_OPERATORS or is_mixer or name in KEPT_XORL_OPERATORS or name == ROUTING_OPERATOR
    is_cheap = _is_low_rank(operation, args) or (expansions and _features(operation, name, args) in expansions)
    return CheckpointPolicy.MUST_SAVE if is_kept and not is_cheap else CheckpointPolicy.PREFER_RECOMPUTE
