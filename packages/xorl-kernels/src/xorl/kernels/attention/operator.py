"""PackedAttention: an attention function as two torch operators, so that it is one node in compiled code.

It does not depend on any kernel: a backend passes in its forward and backward kernels.

Shapes: T tokens, N documents, H query heads, G key/value heads, C channels of a head.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.flop_counter import register_flop_formula

from xorl.kernels.layout import SequenceLayout

Gradients = tuple[Tensor, Tensor, Tensor]


class ForwardKernel(Protocol):
    """(q [T, H, C], k and v [T, G, C], ...) -> (output [T, H, C], log-sum-exp [H, T] in fp32, fp64 for fp64).

    There is at least one token. `cu_seqlens` (on the device) and `offsets` (on the host) are those of `SequenceLayout`.
    With `deterministic`, the same inputs must give the same bits.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        offsets: Tensor,
        *,
        scale: float,
        window: int | None,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor]: ...


class BackwardKernel(Protocol):
    """The gradients of q, k and v, given the gradient of the output ([T, H, C], contiguous) and the forward results.

    `k` and `v` may be a subset of the keys and values that `out` and `lse` were computed from. The result is then the
    contribution of that subset; ring attention sums the contributions over ranks.
    """

    def __call__(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        cu_seqlens: Tensor,
        offsets: Tensor,
        *,
        scale: float,
        window: int | None,
        deterministic: bool,
    ) -> Gradients: ...


class PackedAttention:
    """An `AttentionFn` that calls the operators `xorl::attention_{name}` and `xorl::attention_{name}_backward`.

    Args:
        name: the name of the backend.
        forward, backward: the kernels.
    """

    def __init__(self, name: str, forward: ForwardKernel, backward: BackwardKernel) -> None:
        self.name = name
        self._operator = _define(name, forward, backward)

    def __deepcopy__(self, memo: object) -> "PackedAttention":
        return self  # as for a function, so that a copied model calls the same operators

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, *, scale: float, window: int | None
    ) -> Tensor:
        return self.with_lse(q, k, v, layout, scale=scale, window=window)[0]

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, *, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """The output, and the natural log-sum-exp of each token's scaled scores, [T, H] in fp32 (fp64 for fp64).

        Both are differentiable. The gradient of the log-sum-exp costs one more forward and backward pass, in the
        kernel's precision: the derivatives are sum_j P_ij k_j for q_i (attention over the keys) and sum_i P_ij q_i for
        k_j.
        """
        deterministic = torch.are_deterministic_algorithms_enabled()
        return self._operator(q, k, v, layout.cu_seqlens, layout.offsets, scale, window, deterministic)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    options: tuple[float, int | None, bool]


def _define(
    name: str, forward: ForwardKernel, backward: BackwardKernel
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, int | None, bool], tuple[Tensor, Tensor]]:
    """Register both operators of a backend, and return the forward operator."""

    @torch.library.custom_op(f"xorl::attention_{name}", mutates_args=())
    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        offsets: Tensor,
        scale: float,
        window: int | None,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor]:
        if len(q) == 0:
            return torch.empty_like(q), q.new_empty((q.shape[1], 0), dtype=lse_dtype(q.dtype)).t()
        out, lse = forward(q, k, v, cu_seqlens, offsets, scale=scale, window=window, deterministic=deterministic)
        return out.contiguous(), lse.contiguous().t()

    @torch.library.custom_op(f"xorl::attention_{name}_backward", mutates_args=())
    def attend_backward(
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        cu_seqlens: Tensor,
        offsets: Tensor,
        scale: float,
        window: int | None,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if len(q) == 0:
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        grad_q, grad_k, grad_v = backward(
            grad_out.contiguous(),
            q,
            k,
            v,
            out,
            lse.t().contiguous(),
            cu_seqlens,
            offsets,
            scale=scale,
            window=window,
            deterministic=deterministic,
        )
        return grad_q.contiguous(), grad_k.contiguous(), grad_v.contiguous()

    @attend.register_fake
    def _(q: Tensor, *inputs: object) -> tuple[Tensor, Tensor]:
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype(q.dtype))
        return q.new_empty(q.shape), lse.t()

    @attend_backward.register_fake
    def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *inputs: object) -> Gradients:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def save(ctx: _Context, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        q, k, v, cu_seqlens, offsets, *options = inputs
        ctx.save_for_backward(q, k, v, *output, cu_seqlens, offsets)
        ctx.options = tuple(options)
        ctx.set_materialize_grads(False)

    def differentiate(ctx: _Context, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *layout = ctx.saved_tensors
        grad_q = grad_k = grad_v = None
        if grad_out is not None:
            grad_q, grad_k, grad_v = attend_backward(grad_out, q, k, v, out, lse, *layout, *ctx.options)
        if grad_lse is not None:
            scaled_grad_lse = (grad_lse * ctx.options[0])[..., None]  # [T, H, 1]
            mean_key, _ = attend(q, k, k, *layout, *ctx.options)
            weighted_q = (scaled_grad_lse * q).to(q.dtype)
            _, _, lse_grad_k = attend_backward(weighted_q, q, k, k, mean_key, lse, *layout, *ctx.options)
            lse_grad_q = (scaled_grad_lse * mean_key).to(q.dtype)
            grad_q = lse_grad_q if grad_q is None else grad_q + lse_grad_q
            grad_k = lse_grad_k if grad_k is None else grad_k + lse_grad_k
        return grad_q, grad_k, grad_v, None, None, None, None, None

    attend.register_autograd(differentiate, setup_context=save)
    _count_flops(name)
    return attend


def _count_flops(name: str) -> None:
    """Register both operators with torch's FLOP counter; only pairs of tokens that see each other count.

    The backward pass counts as twice the forward pass; the kernels' recomputation of scores does not count.
    """
    operators = torch.ops.xorl

    @register_flop_formula(getattr(operators, f"attention_{name}"), get_raw=True)
    def _(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        offsets: Tensor,
        scale: float,
        window: int | None,
        *_: object,
        **__: object,
    ) -> int:
        return 4 * q.shape[1] * q.shape[2] * visible_pairs(offsets, window)

    @register_flop_formula(getattr(operators, f"attention_{name}_backward"), get_raw=True)
    def _(
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        cu_seqlens: Tensor,
        offsets: Tensor,
        scale: float,
        window: int | None,
        *_: object,
        **__: object,
    ) -> int:
        return 8 * q.shape[1] * q.shape[2] * visible_pairs(offsets, window)


def visible_pairs(offsets: Tensor, window: int | None) -> int:
    """The number of (query, key) pairs in all documents; a token sees itself and earlier tokens in its window."""
    lengths = offsets.diff()
    seen = lengths if window is None else lengths.clamp(max=window)
    return int((seen * (seen + 1) // 2 + (lengths - seen) * seen).sum())


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of log-sum-exps for q and k of `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def longest_document(offsets: Tensor) -> int:
    """The number of tokens of the longest document. Call it inside an operator, where the compiler does not see it.

    Otherwise the compiler would specialise on the first value, and recompile for the second.
    """
    return int(offsets.diff().max())
