"""PackedAttention: an attention function as two torch operators, so that it is one node in compiled code.

It does not depend on any kernel: a backend passes in its forward and backward kernels.

Shapes: T tokens, N documents, H query heads, G key/value heads, C channels of a head.
"""

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from xorl.kernels.arguments import check_at_least, check_one_device, check_type
from xorl.kernels.attention.kernel import (
    AttentionSpec,
    BackwardKernel,
    Documents,
    ForwardKernel,
    Gradients,
    lse_dtype,
    visible_pairs,
)
from xorl.kernels.attention.ring import define_ring, pairs_of_ring
from xorl.kernels.attention.sinks import add_sinks, grad_of_sinks
from xorl.kernels.layout import SequenceLayout, ShardedLayout


class PackedAttention:
    """An `AttentionFn` that calls the operators `xorl::attention_{name}` and `xorl::attention_{name}_backward`.

    For rings, these are `xorl::attention_{name}_ring` and `xorl::attention_{name}_ring_backward`.

    Args:
        name: the name of the backend, an identifier.
        forward, backward: the kernels, as `xorl.kernels.attention.kernel` describes them; also attributes. They run
            without autograd.
        caps_scores: whether both kernels apply `AttentionSpec.softcap`; also an attribute.
        takes_any_values: whether both kernels take values whose heads have other numbers of channels than keys. For
            others, the narrower ones are padded with zeros.
        reads_lengths: whether the host reads more of the documents than their number and the length of the longest;
            also an attribute. If not, one CUDA graph serves rows of other documents. In rings, all do.

    Raises ValueError for a name that is taken, and kernels that cannot be called.
    """

    def __init__(
        self,
        name: str,
        forward: ForwardKernel,
        backward: BackwardKernel,
        *,
        caps_scores: bool = False,
        takes_any_values: bool = False,
        reads_lengths: bool = True,
    ) -> None:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"name must be an identifier, such as 'my_attention'; got {name!r}")
        if name in _DEFINED:
            raise ValueError(f"name: there is already a PackedAttention {name!r}; choose another name")
        if not (callable(forward) and callable(backward)):
            raise ValueError(f"forward and backward must be functions; got {forward!r} and {backward!r}")
        self.name = name
        self.forward, self.backward, self.caps_scores = forward, backward, caps_scores
        self.takes_any_values = takes_any_values
        self.reads_lengths = reads_lengths
        self._operator = _define(name, forward, backward)
        self._ring_operator = define_ring(name, forward, backward)
        _count_flops(name)
        _DEFINED[name] = self

    def __reduce__(self) -> tuple[Callable[[str, str], "PackedAttention"], tuple[str, str]]:
        # Pickled by name, as a function is: operators belong to their process.
        return _defined, (self.name, self.forward.__module__)

    def __deepcopy__(self, memo: object) -> "PackedAttention":
        return self  # as for a function, so that a copied model calls the same operators

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        return self._call(q, k, v, layout, spec, sinks)[0]

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """The output, and the natural log-sum-exp of each token's scaled scores, [T, H] in fp32 (fp64 for fp64).

        Both are differentiable. The gradient of the log-sum-exp costs one more forward and backward pass, in the
        kernel's precision: the derivatives are sum_j P_ij k_j for q_i (attention over the keys) and sum_i P_ij q_i for
        k_j. Of capped scores, only the output is differentiable.
        """
        return self._call(q, k, v, layout, spec, None)

    def _call(
        self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, spec: AttentionSpec, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        check_inputs(q, k, v, layout, spec, sinks)
        self._check_cap(spec)
        deterministic, num_channels = torch.are_deterministic_algorithms_enabled(), v.shape[-1]
        if not self.takes_any_values:
            q, k, v = (padded(x, max(q.shape[-1], num_channels)) for x in (q, k, v))
        out, lse = self._operator(q, k, v, sinks, layout.cu_seqlens, layout.offsets, *spec, deterministic)
        return cut(out, num_channels), lse

    def in_ring(
        self, q: Tensor, k: Tensor, v: Tensor, layout: ShardedLayout, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        """As `AttentionFn.in_ring`."""
        check_inputs(q, k, v, layout, spec, sinks, in_ring=True)
        self._check_cap(spec)
        deterministic, num_channels = torch.are_deterministic_algorithms_enabled(), v.shape[-1]
        q, k, v = (padded(x, max(q.shape[-1], num_channels)) for x in (q, k, v))
        out, _ = self._ring_operator(q, k, v, sinks, layout.whole.offsets, *layout.ring, *spec, deterministic)
        return cut(out, num_channels)

    def _check_cap(self, spec: AttentionSpec) -> None:
        if spec.softcap is not None and not self.caps_scores:
            raise ValueError(
                f"softcap: attention backend {self.name!r} does not cap scores; use another, such as eager"
            )


def padded(x: Tensor, num_channels: int) -> Tensor:
    """Heads with so many channels: zeros change neither scores nor the channels of the output that values have."""
    return x if x.shape[-1] == num_channels else F.pad(x, (0, num_channels - x.shape[-1]))


def cut(out: Tensor, num_channels: int) -> Tensor:
    """The first channels of heads."""
    return out if out.shape[-1] == num_channels else out[..., :num_channels]


_DEFINED: dict[str, PackedAttention] = {}


def _defined(name: str, module: str) -> PackedAttention:
    """The PackedAttention `name` of this process, which `module` defines when it is imported. Unpickles them."""
    import_module(module)
    if name not in _DEFINED:
        raise RuntimeError(f"attention {name!r} is not defined in this process; create its PackedAttention first")
    return _DEFINED[name]


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    *,
    in_ring: bool = False,
) -> None:
    """Raise ValueError for inputs that kernels would misread. Compiled code has been checked before."""
    if torch.compiler.is_compiling():
        return
    if in_ring:
        check_type("layout", layout, ShardedLayout, "ShardedLayout(whole, ring, ulysses, group_name)")
    else:
        check_type("layout", layout, SequenceLayout, "SequenceLayout.from_lengths([5, 3])")
    check_type("spec", spec, AttentionSpec, "AttentionSpec(scale=0.125)")
    for name, value in (("scale", spec.scale), ("softcap", 1.0 if spec.softcap is None else spec.softcap)):
        if not isinstance(value, float | int) or not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a finite number above 0, such as head_dim**-0.5; got {value!r}")
    check_at_least("window", spec.window, 1, optional=True)
    check_type("causal", spec.causal, bool, "True")
    if not spec.causal and (spec.window is not None or in_ring):
        raise ValueError(f"causal: False does not go with {'a ring' if in_ring else f'window={spec.window}'}")
    num_tokens = layout.num_tokens
    if isinstance(layout, ShardedLayout) and in_ring:
        num_tokens = layout.whole.num_tokens // layout.ring.size
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 3 or k.shape[:2] != v.shape[:2] or q.shape[2] != k.shape[2]:
        raise ValueError(f"q must be [T, H, C], k [T, G, C] and v [T, G, V]; got {shapes}")
    if not len(q) == len(k) == num_tokens:
        raise ValueError(f"q, k and v must have the {num_tokens} tokens of the layout; got {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"the number of query heads must be a multiple of that of key/value heads; got {shapes}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(
            f"q, k and v must have the same dtype, of floating point; got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if sinks is not None and (sinks.shape != q.shape[1:2] or not sinks.is_floating_point()):
        raise ValueError(f"sinks must be [{q.shape[1]}], one number per head; got {list(sinks.shape)} in {sinks.dtype}")
    check_one_device(q=q, k=k, v=v, layout=layout.cu_seqlens, **({} if sinks is None else {"sinks": sinks}))


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    spec: AttentionSpec
    deterministic: bool


def _define(name: str, forward: ForwardKernel, backward: BackwardKernel) -> Callable[..., tuple[Tensor, Tensor]]:
    """Register both operators of a backend, and return the forward operator."""

    @torch.library.custom_op(f"xorl::attention_{name}", mutates_args=())
    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        cu_seqlens: Tensor,
        offsets: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        causal: bool,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor]:
        if len(q) == 0:
            return torch.empty_like(q), q.new_empty((q.shape[1], 0), dtype=lse_dtype(q.dtype)).t()
        documents = Documents(cu_seqlens, offsets)
        spec = AttentionSpec(scale, window, softcap, causal)
        out, lse = add_sinks(*forward(q, k, v, documents, documents, spec, deterministic=deterministic), sinks)
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
        softcap: float | None,
        causal: bool,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if len(q) == 0:
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        documents = Documents(cu_seqlens, offsets)
        grad_q, grad_k, grad_v = backward(
            grad_out.contiguous(),
            q,
            k,
            v,
            out,
            lse.t().contiguous(),
            documents,
            documents,
            AttentionSpec(scale, window, softcap, causal),
            deterministic=deterministic,
        )
        return grad_q.contiguous(), grad_k.contiguous(), grad_v.contiguous()

    @attend.register_fake
    def _(q: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype(q.dtype))
        return q.new_empty((*q.shape[:2], inputs[1].shape[2])), lse.t()

    @attend_backward.register_fake
    def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *inputs: object) -> Gradients:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def save(ctx: _Context, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        q, k, v, sinks, cu_seqlens, offsets, *spec, deterministic = inputs
        ctx.save_for_backward(q, k, v, *output, cu_seqlens, offsets, *([] if sinks is None else [sinks]))
        ctx.spec, ctx.deterministic = AttentionSpec(*spec), deterministic
        ctx.set_materialize_grads(False)

    def differentiate(ctx: _Context, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, cu_seqlens, offsets, *sinks = ctx.saved_tensors
        rest = cu_seqlens, offsets, *ctx.spec, ctx.deterministic
        grad_q = grad_k = grad_v = grad_sinks = None
        if grad_out is not None:
            grad_q, grad_k, grad_v = attend_backward(grad_out, q, k, v, out, lse, *rest)
            grad_sinks = grad_of_sinks(grad_out, out, lse.t(), sinks[0]) if sinks else None
        if grad_lse is not None:
            if ctx.spec.softcap is not None:
                raise RuntimeError("the log-sum-exp of capped scores is not differentiable; use the output alone")
            scaled_grad_lse = (grad_lse * ctx.spec.scale)[..., None]  # [T, H, 1]
            mean_key, _ = attend(q, k, k, None, *rest)
            weighted_q = (scaled_grad_lse * q).to(q.dtype)
            _, _, lse_grad_k = attend_backward(weighted_q, q, k, k, mean_key, lse, *rest)
            lse_grad_q = (scaled_grad_lse * mean_key).to(q.dtype)
            grad_q = lse_grad_q if grad_q is None else grad_q + lse_grad_q
            grad_k = lse_grad_k if grad_k is None else grad_k + lse_grad_k
        return grad_q, grad_k, grad_v, grad_sinks, *[None] * 7

    attend.register_autograd(differentiate, setup_context=save)
    return attend


def _count_flops(name: str) -> None:
    """Register the operators with torch's FLOP counter; only pairs of tokens that see each other count.

    The backward pass counts as twice the forward pass; the kernels' recomputation of scores does not count.
    """
    # The indices of q and of the first input that describes documents, and the FLOPs of a pair and channel.
    for suffix, q_index, index, factor in (("", 0, 4, 4), ("_backward", 1, 6, 8)):
        for kind, pairs_of in (("", _pairs), ("_ring", _pairs_in_ring)):
            operator = getattr(torch.ops.xorl, f"attention_{name}{kind}{suffix}")
            count = partial(_flops, pairs_of=pairs_of, q_index=q_index, index=index, factor=factor)
            register_flop_formula(operator, get_raw=True)(count)


def _flops(*inputs: Tensor, pairs_of: Callable[..., int], q_index: int, index: int, factor: int, **_: object) -> int:
    return factor * inputs[q_index].shape[1] * inputs[q_index].shape[2] * pairs_of(*inputs[index:])


def _pairs(
    cu_seqlens: Tensor,
    offsets: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    causal: bool,
    *_: object,
) -> int:
    return visible_pairs(offsets, window, causal=causal)


def _pairs_in_ring(
    offsets: Tensor, rank: int, size: int, group_name: str, scale: float, window: int | None, *_: object
) -> int:
    return pairs_of_ring(offsets, rank, size, window)
