"""Which functions a decoder layer computes with, plain torch or fused kernels: the one place where that is decided."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from xorl.kernels.attention import AttentionFn, sdpa_attention
from xorl.kernels.fused import HeadNorms, HeadShape, RopeTables, opaque, reference, triton_refusal

logger = logging.getLogger(__name__)

FusedKernel = Literal["rms_norm", "rope", "swiglu"]
# Compiled layers take them too: each is faster than what torch.compile makes of its plain form (tools/bench_fused.py).
FUSED_KERNELS: tuple[FusedKernel, ...] = ("rms_norm", "rope", "swiglu")

SplitHeadsFn = Callable[
    [tuple[Tensor, ...], HeadShape, HeadNorms | None, RopeTables | None], tuple[Tensor, Tensor, Tensor]
]


@dataclass(frozen=True)
class LayerKernels:
    """The functions of a decoder's layers, with the signatures and meanings of `xorl.kernels.fused.reference`.

    The defaults are the plain forms, which run anywhere and in any floating-point dtype.

    Attributes:
        add: the sum of the residual stream and a layer's last output.
        swiglu_linear: swiglu and the linear layer after it in one, where that saves the backward pass some work.
    """

    attention: AttentionFn = sdpa_attention
    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]] = reference.add_rms_norm
    add: Callable[[Tensor, Tensor], Tensor] = torch.add
    split_heads: SplitHeadsFn = reference.split_heads
    swiglu: Callable[[Tensor], Tensor] = reference.swiglu
    swiglu_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None


def choose_kernels(
    attention: AttentionFn,
    *,
    device_type: str,
    dtype: torch.dtype,
    compiled: bool,
    native: Collection[FusedKernel],
    cast_bf16: bool,
) -> LayerKernels:
    """The kernels for layers that compute in `dtype` on such a device; logs what was chosen.

    Args:
        attention: resolved already.
        compiled: whether torch.compile will fuse plain forms.
        native: those to be computed in the plain form wherever they run, with its roundings.
        cast_bf16: round queries and keys to bf16 before attention, which computes in `dtype` all the same.
    """
    refusal = triton_refusal(device_type)
    if refusal is None and dtype == torch.float64:
        refusal = "fused kernels compute in fp32"
    fused: set[FusedKernel] = {name for name in FUSED_KERNELS if name not in native and refusal is None}
    chosen = " ".join(f"{name}={'fused' if name in fused else 'plain'}" for name in FUSED_KERNELS)
    logger.info("kernels %s compiled=%s%s", chosen, compiled, f" refusal={refusal!r}" if refusal else "")
    # Only a compiler takes plain forms apart.
    plain = _with_opaque(attention, native) if compiled and native else LayerKernels(attention)
    kernels = _with_fused(plain, fused, compiled=compiled) if fused else plain
    if cast_bf16:
        kernels = replace(kernels, split_heads=_rounding_to_bf16(kernels.split_heads))
    return kernels


def _with_opaque(attention: AttentionFn, names: Collection[FusedKernel]) -> LayerKernels:
    norm = opaque.rms_norm if "rms_norm" in names else reference.rms_norm
    turn = opaque.apply_rope if "rope" in names else reference.apply_rope
    return LayerKernels(
        attention,
        add_rms_norm=opaque.add_rms_norm if "rms_norm" in names else reference.add_rms_norm,
        add=opaque.add if "rms_norm" in names else torch.add,
        split_heads=partial(reference.split_heads, norm=norm, turn=turn),
        swiglu=opaque.swiglu if "swiglu" in names else reference.swiglu,
    )


def _with_fused(plain: LayerKernels, fused: Collection[FusedKernel], *, compiled: bool) -> LayerKernels:
    # They need Triton.
    from xorl.kernels.fused import heads, rms_norm, swiglu  # noqa: PLC0415

    norms_fused, rope_fused = "rms_norm" in fused, "rope" in fused
    norms_by = heads.split_heads if norms_fused else plain.split_heads
    rope_by = heads.split_heads if rope_fused else plain.split_heads
    return replace(
        plain,
        add_rms_norm=rms_norm.add_rms_norm if norms_fused else plain.add_rms_norm,
        split_heads=norms_by if norms_fused == rope_fused else _in_two_steps(norms_by, rope_by),
        swiglu=swiglu.swiglu if "swiglu" in fused else plain.swiglu,
        swiglu_linear=swiglu.swiglu_linear if "swiglu" in fused and compiled else None,
    )


def _in_two_steps(norms_by: SplitHeadsFn, rope_by: SplitHeadsFn) -> SplitHeadsFn:
    """One function norms queries and keys, another one turns them."""

    def split_heads(
        projected: tuple[Tensor, ...], shape: HeadShape, norms: HeadNorms | None, rope: RopeTables | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if norms is None:
            return rope_by(projected, shape, None, rope)
        normed = norms_by(projected, shape, norms, None)
        return rope_by(tuple(x.flatten(-2) for x in normed), shape, None, rope)

    return split_heads


def _rounding_to_bf16(split: SplitHeadsFn) -> SplitHeadsFn:
    def split_heads(
        projected: tuple[Tensor, ...], shape: HeadShape, norms: HeadNorms | None, rope: RopeTables | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = split(projected, shape, norms, rope)
        return opaque.round_to_bf16(q), opaque.round_to_bf16(k), v

    return split_heads
