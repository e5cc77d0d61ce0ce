"""Selects the functions that a decoder layer computes with: plain torch or fused kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from xorl.core.nn.dispatch import Dispatcher
from xorl.core.nn.rotary import RopeConfig
from xorl.core.nn.tensor import ALONE, TensorRanks
from xorl.kernels.arguments import check_choice, check_device_type, check_type
from xorl.kernels.attention import AttentionFn
from xorl.kernels.attention.sdpa import sdpa_attention
from xorl.kernels.experts import ExpertsFn, grouped
from xorl.kernels.fused import HeadNorms, HeadShape, RopeTables, opaque, reference, triton_refusal
from xorl.kernels.recurrent import PLAIN_RECURRENCE, RecurrenceFns

logger = logging.getLogger(__name__)

FusedKernel = Literal["rms_norm", "rope", "swiglu"]
# Compiled layers use them too: each is faster than its plain form under torch.compile (tools/bench_fused.py).
FUSED_KERNELS: tuple[FusedKernel, ...] = ("rms_norm", "rope", "swiglu")

SplitHeadsFn = Callable[
    [tuple[Tensor, ...], HeadShape, HeadNorms | None, RopeTables | None], tuple[Tensor, Tensor, Tensor]
]


def _unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class LayerKernels:
    """The functions that decoder layers compute with; `xorl.kernels.fused.reference` defines their semantics.

    The defaults are plain torch, which runs on any device and in any floating-point dtype.

    Attributes:
        attention_by_layer: the attention functions of layers by their numbers, if one does not serve them all.
        add: adds a layer's last output to the residual stream.
        experts: computes the experts of a layer.
        recurrence: the functions of layers with a recurrence.
        dispatcher: sends tokens to the ranks of their experts; None: every rank holds all experts.
        tensor: the ranks that share each matrix.
        swiglu_linear: swiglu fused with the next linear layer, if that saves work in the backward pass; else None.
        norm, rotate: of heads, where `split_heads` does not compute them.
        round_heads: rounds queries and keys before attention, if that is chosen.
        image_attention: the attention function of the image encoder, which is not causal.
    """

    attention: AttentionFn = sdpa_attention
    attention_by_layer: Mapping[int, AttentionFn] = field(default_factory=dict)
    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float, float], tuple[Tensor, Tensor]] = (
        reference.add_rms_norm
    )
    add: Callable[[Tensor, Tensor], Tensor] = torch.add
    split_heads: SplitHeadsFn = reference.split_heads
    swiglu: Callable[[Tensor], Tensor] = reference.swiglu
    swiglu_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
    experts: ExpertsFn = grouped.experts
    recurrence: RecurrenceFns = PLAIN_RECURRENCE
    dispatcher: Dispatcher[Any] | None = None
    tensor: TensorRanks = ALONE
    norm: Callable[[Tensor, Tensor, float, float], Tensor] = reference.rms_norm
    rotate: Callable[..., Tensor] = reference.apply_rope
    round_heads: Callable[[Tensor], Tensor] = _unchanged
    image_attention: AttentionFn = sdpa_attention

    def of_layer(self, index: int) -> LayerKernels:
        """The functions of one layer of the decoder."""
        return replace(self, attention=self.attention_by_layer.get(index, self.attention))

    def split_heads_of(self, rope: RopeConfig | None) -> SplitHeadsFn:
        """The function for heads with this rotation."""
        if rope is None or (rope.rotary_dim is None and not rope.interleaved):
            return self.split_heads
        rotate = partial(self.rotate, interleaved=rope.interleaved)
        return _rounding(partial(reference.split_heads, norm=self.norm, rotate=rotate), self.round_heads)


def choose_kernels(
    attention: AttentionFn,
    *,
    device_type: str,
    dtype: torch.dtype,
    compiled: bool,
    native: Collection[FusedKernel],
    cast_bf16: bool,
    experts: ExpertsFn = grouped.experts,
    recurrence: RecurrenceFns = PLAIN_RECURRENCE,
    dispatcher: Dispatcher[Any] | None = None,
    tensor: TensorRanks = ALONE,
) -> LayerKernels:
    """Select the kernels for layers that compute in `dtype` on this device type, and log the selection.

    Args:
        attention: the attention function.
        compiled: whether the layers will be compiled.
        native: operations that always use the plain form, including its rounding.
        experts: the function of layers of experts.
        recurrence: the functions of layers with a recurrence.
        dispatcher: sends tokens to experts of other ranks; None: every rank holds all experts.
        tensor: the ranks that share each matrix.
        cast_bf16: round queries and keys to bf16 before attention, which still computes in `dtype`.
    """
    check_device_type(device_type)
    check_type("dtype", dtype, torch.dtype, "torch.bfloat16")
    for name in native:
        check_choice("native", name, FusedKernel)
    refusal = triton_refusal(device_type)
    if refusal is None and dtype == torch.float64:
        refusal = "fused kernels compute in fp32"
    fused: set[FusedKernel] = {name for name in FUSED_KERNELS if name not in native and refusal is None}
    chosen = " ".join(f"{name}={'fused' if name in fused else 'plain'}" for name in FUSED_KERNELS)
    logger.debug("kernels %s compiled=%s%s", chosen, compiled, f" refusal={refusal!r}" if refusal else "")
    # Only compiled layers need opaque operators: the compiler would fuse plain ones and change their rounding.
    plain = _with_opaque(attention, native) if compiled and native else LayerKernels(attention)
    kernels = _with_fused(plain, fused, compiled=compiled) if fused else plain
    kernels = replace(kernels, experts=experts, recurrence=recurrence, dispatcher=dispatcher, tensor=tensor)
    if cast_bf16:
        split_heads = _rounding(kernels.split_heads, opaque.round_to_bf16)
        kernels = replace(kernels, split_heads=split_heads, round_heads=opaque.round_to_bf16)
    return kernels


def _with_opaque(attention: AttentionFn, names: Collection[FusedKernel]) -> LayerKernels:
    norm = opaque.rms_norm if "rms_norm" in names else reference.rms_norm
    rotate = opaque.apply_rope if "rope" in names else reference.apply_rope
    return LayerKernels(
        attention,
        add_rms_norm=opaque.add_rms_norm if "rms_norm" in names else reference.add_rms_norm,
        add=opaque.add if "rms_norm" in names else torch.add,
        split_heads=partial(reference.split_heads, norm=norm, rotate=rotate),
        norm=norm,
        rotate=rotate,
        swiglu=opaque.swiglu if "swiglu" in names else reference.swiglu,
    )


def _with_fused(plain: LayerKernels, fused: Collection[FusedKernel], *, compiled: bool) -> LayerKernels:
    # These modules need Triton.
    from xorl.kernels.fused import heads, rms_norm, swiglu  # noqa: PLC0415

    norms_fused, rope_fused = "rms_norm" in fused, "rope" in fused
    norm_fn = heads.split_heads if norms_fused else plain.split_heads
    rope_fn = heads.split_heads if rope_fused else plain.split_heads
    return replace(
        plain,
        add_rms_norm=rms_norm.add_rms_norm if norms_fused else plain.add_rms_norm,
        split_heads=norm_fn if norms_fused == rope_fused else _norm_then_rotate(norm_fn, rope_fn),
        swiglu=swiglu.swiglu if "swiglu" in fused else plain.swiglu,
        swiglu_linear=swiglu.swiglu_linear if "swiglu" in fused and compiled else None,
    )


def _norm_then_rotate(norm_fn: SplitHeadsFn, rope_fn: SplitHeadsFn) -> SplitHeadsFn:
    """Normalise queries and keys with one function, and rotate them with another."""

    def split_heads(
        projected: tuple[Tensor, ...], shape: HeadShape, norms: HeadNorms | None, rope: RopeTables | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if norms is None:
            return rope_fn(projected, shape, None, rope)
        normed = norm_fn(projected, shape, norms, None)
        return rope_fn(tuple(x.flatten(-2) for x in normed), shape, None, rope)

    return split_heads


def _rounding(split: SplitHeadsFn, round_heads: Callable[[Tensor], Tensor]) -> SplitHeadsFn:
    """Round the queries and keys that `split` computes."""

    def split_heads(
        projected: tuple[Tensor, ...], shape: HeadShape, norms: HeadNorms | None, rope: RopeTables | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = split(projected, shape, norms, rope)
        return round_heads(q), round_heads(k), v

    return split_heads
