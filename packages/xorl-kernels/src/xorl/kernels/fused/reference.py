"""Plain twins of the fused kernels, in torch, for any device and any floating-point dtype.

Norms, rotations and activations raise ValueError for shapes, dtypes and devices that do not fit.

Shapes: T tokens, D model width, H query heads, G key/value heads, C channels of a head, F feed-forward width, B rows, V
vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from xorl.kernels.fused.arguments import (
    HeadNorms,
    HeadShape,
    RopeTables,
    check_gate_up,
    check_heads,
    check_norm,
    check_rope,
)

IGNORE = -100


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / rms(x) * (weight + offset) over the last dimension, in fp32, rounded once to x's dtype (arXiv:1910.07467).

    The weight, [D], is rounded to the dtype of x first, but its sum with the offset is not.
    """
    check_norm(x, None, weight, eps)
    if not offset:
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(x.dtype).to(wide) + offset, eps).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(residual + x, rounded to the dtype of x; its `rms_norm`). Without a residual the first result is x.

    x and residual have the same shape and dtype. Callers that need x afterwards must use the first result instead.
    """
    check_norm(x, residual, weight, eps)
    summed = x if residual is None else residual + x
    return summed, rms_norm(summed, weight, eps, offset)


def apply_rope(x: Tensor, rope: RopeTables, *, interleaved: bool = False) -> Tensor:
    """Rotate channel pairs of x [T, H, C] by their angles; computed in fp32, result in x's dtype.

    Tables of R / 2 angles rotate the first R channels: pairs (i, i + R / 2), or (2i, 2i + 1) if interleaved.
    """
    check_rope(x, rope, partial=True)
    cos, sin = (table[:, None, :] for table in rope)  # [T, 1, R / 2]
    num_rotated = 2 * cos.shape[-1]
    if num_rotated < x.shape[-1]:
        rotated = apply_rope(x[..., :num_rotated], rope, interleaved=interleaved)
        return torch.cat((rotated, x[..., num_rotated:]), dim=-1)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if interleaved:
        first, second = wide[..., ::2], wide[..., 1::2]
        rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return rotated.flatten(-2).to(x.dtype)
    first, second = wide.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def split_heads(
    projected: tuple[Tensor, ...],
    shape: HeadShape,
    norms: HeadNorms | None,
    rope: RopeTables | None,
    *,
    norm: Callable[[Tensor, Tensor, float, float], Tensor] = rms_norm,
    rotate: Callable[[Tensor, RopeTables], Tensor] = apply_rope,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, C], k and v [T, G, C] for attention, computed from the output of the projections.

    Args:
        projected: (qkv [T, (H + 2G) * C],) or (q [T, H * C], k and v [T, G * C]).
        shape: H, G and C.
        norms: RMS norms of queries and keys, or None.
        rope: rotation of queries and keys, applied after the norms, or None.
        norm, rotate: the functions that apply them.

    Raises ValueError for shapes, dtypes or devices that do not fit.
    """
    check_heads(projected, shape, None, None)  # `norm` and `rotate` check the others
    if len(projected) == 1:
        projected = projected[0].split(shape.row_counts, dim=-1)
    q, k, v = (x.unflatten(-1, (-1, shape.head_dim)) for x in projected)  # [T, H or G, C]
    if norms is not None:
        q, k = (norm(x, weight, norms.eps, norms.offset) for x, weight in ((q, norms.q_weight), (k, norms.k_weight)))
    if rope is not None:
        q, k = rotate(q, rope), rotate(k, rope)
    return q, k, v


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [T, 2F] -> [T, F]; the first half of each row is the gate (arXiv:2002.05202)."""
    check_gate_up(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_linear(gate_up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """swiglu(gate_up) @ weight.T + bias, [T, 2F] -> [T, D] with weight [D, F]."""
    return F.linear(swiglu(gate_up), weight, bias)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(logits / softcap) in fp32 (fp64 for fp64 logits); with None, the logits in that dtype."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if softcap is None else softcap * torch.tanh(wide / softcap)


def slope_of_cap(capped_logits: Tensor, softcap: float) -> Tensor:
    """The derivative of `capped`, from its results."""
    return 1 - (capped_logits / softcap).square()


class RowLosses(NamedTuple):
    """The results of `cross_entropy_rows` for B rows of logits. Slices are views, which can be filled chunk by chunk.

    Attributes:
        loss: [B] fp32, or fp64 for fp64 logits.
        correct: [B] bool: whether the label is the first of the largest logits.
        scale: [B] in the loss's dtype: the factor by which a row's gradient must still be multiplied.
        label_error: [B] in the loss's dtype: what rounding takes from the gradient at the label, times `scale`, for the
            caller to add. That element is about as large as all others together, so its error would dominate.
    """

    loss: Tensor
    correct: Tensor
    scale: Tensor
    label_error: Tensor

    @classmethod
    def empty(cls, num_rows: int, dtype: torch.dtype, device: torch.device) -> Self:
        """Uninitialised results, for losses of `dtype`."""
        return cls(*(torch.empty(num_rows, dtype=each, device=device) for each in (dtype, torch.bool, dtype, dtype)))

    def rows(self, start: int, stop: int) -> Self:
        """Views of rows [start, stop)."""
        return self._make(values[start:stop] for values in self)


class PartLosses(NamedTuple):
    """What a rank knows of B rows from its own logits, [B] fp32 or fp64. Rows of ignored labels are undefined.

    Attributes:
        shift: the gradient that is stored is exp(logit - shift), times the derivative of the cap if there is one.
        rounded: the stored gradient at the label, if this rank has it.
        log_sum: the logarithm of the sum of the exponentials.
        target: the logit of the label; -inf if another rank has it.
        largest: the largest logit.
        before: the largest logit before the label; -inf if there is none, or another rank has the label.
    """

    shift: Tensor
    rounded: Tensor
    log_sum: Tensor
    target: Tensor
    largest: Tensor
    before: Tensor

    @classmethod
    def empty(cls, num_rows: int, dtype: torch.dtype, device: torch.device) -> Self:
        """Uninitialised values."""
        return cls(*torch.empty(len(cls._fields), num_rows, dtype=dtype, device=device))

    def rows(self, start: int, stop: int) -> Self:
        """Views of rows [start, stop)."""
        return self._make(values[start:stop] for values in self)


def cross_entropy_rows(
    logits: Tensor,
    labels: Tensor,
    token_weight: Tensor | None,
    gradient: Tensor | None,
    results: RowLosses,
    softcap: float | None = None,
) -> None:
    """Cross-entropy of each row, and optionally its gradient, computed in fp32 (fp64 for fp64 logits).

    Args:
        logits: [B, V].
        labels: [B] int64; -100 is ignored.
        token_weight: [B], multiplies the scales; None means 1. The losses are not multiplied.
        gradient: [B, V] in any dtype, overwritten; may be `logits` itself. Its rows times the scales are the gradient
            of the logits. None skips it.
        results: for B rows, overwritten; zeros for ignored labels. `scale` and `label_error` are only meaningful with a
            gradient.
        softcap: caps the logits; the gradient is that of the logits before it. None: no cap.
    """
    wide = capped(logits, softcap)
    trained = labels != IGNORE
    targets = labels.clamp(min=0)[:, None]  # [B, 1]
    logsumexp = wide.logsumexp(dim=-1, keepdim=True)  # [B, 1]
    results.loss.copy_((logsumexp - wide.gather(1, targets)).squeeze(1).masked_fill(~trained, 0.0))
    results.correct.copy_(wide.argmax(dim=-1) == labels)
    results.scale.copy_(trained if token_weight is None else token_weight * trained)
    if gradient is not None:
        rows = (wide - logsumexp).exp_()  # [B, V]
        rows.scatter_add_(1, targets, rows.new_full((), -1.0).expand_as(targets))
        if softcap is not None:
            rows.mul_(slope_of_cap(wide, softcap))
        gradient.copy_(rows.masked_fill_(~trained[:, None], 0.0))
        error = (rows.gather(1, targets) - gradient.gather(1, targets)).squeeze(1)
        results.label_error.copy_(error * results.scale)


def cross_entropy_part(
    logits: Tensor, labels: Tensor, gradient: Tensor | None, part: PartLosses, softcap: float | None = None
) -> None:
    """What a rank that has some tokens of the vocabulary computes for `combine`, in fp32 (fp64 for fp64 logits).

    Args:
        logits: [B, V / P].
        labels: [B] int64, of this rank's tokens; -1 if another rank has it, -100 is ignored.
        gradient: [B, V / P] in any dtype, overwritten with exp(logit - shift), times the derivative of the cap; may be
            `logits` itself. None skips it.
        part: for B rows, overwritten.
        softcap: caps the logits; None: no cap.
    """
    wide = capped(logits, softcap)
    trained, is_held = labels != IGNORE, labels >= 0
    at = labels.clamp(min=0)[:, None]  # [B, 1]
    largest = wide.amax(dim=-1)
    part.largest.copy_(largest)
    part.log_sum.copy_(wide.logsumexp(dim=-1))
    part.shift.copy_(largest)
    part.target.copy_(wide.gather(1, at).squeeze(1).masked_fill(~is_held, -torch.inf))
    is_before = torch.arange(wide.shape[1], device=wide.device) < at
    part.before.copy_(wide.masked_fill(~is_before, -torch.inf).amax(dim=-1).masked_fill(~is_held, -torch.inf))
    if gradient is not None:
        rows = (wide - largest[:, None]).exp_()
        if softcap is not None:
            rows.mul_(slope_of_cap(wide, softcap))
        gradient.copy_(rows.masked_fill_(~trained[:, None], 0.0))
        part.rounded.copy_(gradient.gather(1, at).squeeze(1))


def add_at_labels_(target: Tensor, rows: Tensor, labels: Tensor, factors: Tensor) -> None:
    """target[labels[b]] += factors[b] * rows[b] for each b; sums are fp32, and rounded once for each label.

    Args:
        target: [V, D], updated in place.
        rows: [B, D] in any dtype.
        labels: [B] int64; labels outside [0, V) are skipped.
        factors: [B] fp32.
    """
    chosen = ((labels >= 0) & (labels < len(target))).nonzero().squeeze(1)
    indices, inverse = labels[chosen].unique(return_inverse=True)
    totals = torch.zeros(len(indices), rows.shape[1], dtype=torch.float32, device=rows.device)
    totals.index_add_(0, inverse, rows[chosen].float() * factors[chosen, None])
    target[indices] = (target[indices].float() + totals).to(target.dtype)


def widened_sum_(out: Tensor, first: Tensor, others: Tensor) -> Tensor:
    """out [n] fp32 = first [n] + others[0] + others[1] + ..., in that order, for others [K, n]; returns out."""
    out.copy_(first)
    for other in others:
        out += other
    return out
