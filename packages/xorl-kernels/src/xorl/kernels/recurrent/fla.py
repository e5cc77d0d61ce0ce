"""The functions of recurrent layers by the library fla-core, as torch operators; the only module that imports it.

Imports private functions of the library, so it supports only one version. One of them is replaced: with some releases
of Triton, its kernel computes wrong gradients on Hopper (flash-linear-attention, issue 640). Its kernels run with fixed
configurations. The library would choose them by timing in each process, which takes minutes and may end in another
choice, with other last bits.

Shapes: T tokens, G key heads, H value heads, K and V channels of their heads, C channels of a convolution, W taps.
"""

from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
import triton
from fla.modules.causal_conv1d import (  # pyright: ignore[reportMissingImports]
    causal_conv1d_bwd,
    causal_conv1d_fwd,
)
from fla.modules.norm.fused_norm_gate import (  # pyright: ignore[reportMissingImports]
    layer_norm_gated_bwd,
    layer_norm_gated_fwd,
)
from fla.ops.common.chunk_delta_h import (  # pyright: ignore[reportMissingImports]
    chunk_gated_delta_rule_fwd_kernel_h_blockdim64 as states_kernel,
)
from fla.ops.gated_delta_rule.chunk import (  # pyright: ignore[reportMissingImports]
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
)
from fla.ops.utils.index import prepare_chunk_indices  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.autograd.function import FunctionCtx
from triton.runtime import Autotuner

from xorl.kernels.fused.rms_norm import add_rms_norm
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.recurrent import space_triton
from xorl.kernels.recurrent.backends import RecurrenceFns
from xorl.kernels.recurrent.causal_conv import Activation
from xorl.kernels.recurrent.delta_triton import CHUNK_TOKENS, chunk_gradients
from xorl.kernels.recurrent.norms import UNIT_EPS

# The fastest configuration of each kernel, by module: constants, warps and stages. Measured on an H200, 16,384 tokens,
# 16 key heads and 32 value heads of 128 channels.
CONFIGS: dict[str, dict[str, tuple[dict[str, int], int, int]]] = {
    "fla.modules.causal_conv1d.ops": {
        "causal_conv1d_fwd_kernel": ({"BD": 32}, 4, 3),
        "causal_conv1d_bwd_kernel": ({"BD": 32}, 4, 3),
    },
    "fla.modules.norm.fused_norm_gate": {
        "layer_norm_gated_fwd_kernel": ({"BT": 32}, 4, 3),
        "layer_norm_gated_bwd_kernel": ({"BT": 64}, 16, 3),
    },
    "fla.ops.common.chunk_delta_h": {
        "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": ({"BV": 32}, 4, 2),
    },
    "fla.ops.common.chunk_o": {
        "chunk_fwd_kernel_o": ({"BK": 64, "BV": 64}, 4, 3),
        "chunk_bwd_kernel_dv_local": ({}, 2, 2),
    },
    "fla.ops.gated_delta_rule.chunk_fwd": {"chunk_gated_delta_rule_fwd_kkt_solve_kernel": ({"BK": 64}, 1, 3)},
    "fla.ops.gated_delta_rule.wy_fast": {
        "recompute_w_u_fwd_kernel": ({}, 4, 3),
        "prepare_wy_repr_bwd_kernel": ({}, 4, 3),
    },
    "fla.ops.utils.cumsum": {"chunk_local_cumsum_scalar_kernel": ({}, 1, 3)},
}
# Of the kernel of states; with wider keys, four stages do not fit into shared memory.
WIDE_KEY_DIM = 128
NUM_STAGES = {False: 4, True: 2}


def _tuner(kernel: object) -> Autotuner:
    while not isinstance(kernel, Autotuner):
        kernel = vars(kernel)["fn"]
    return kernel


def _fix_configs() -> None:
    for module, kernels in CONFIGS.items():
        for name, (constants, num_warps, num_stages) in kernels.items():
            config = triton.Config(constants, num_warps=num_warps, num_stages=num_stages)
            _tuner(getattr(import_module(module), name)).configs = [config]


_fix_configs()


def _fix_states(key_dim: int) -> None:
    num_stages = NUM_STAGES[key_dim > WIDE_KEY_DIM]
    _tuner(states_kernel).configs = [triton.Config({"BV": 64}, num_warps=4, num_stages=num_stages)]


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: SequenceLayout) -> Tensor:
    """The gated delta rule, as the plain `gated_delta`; products are in bf16, sums and states in fp32."""
    out, _, _ = _gated_delta(q, k, v, g, beta, layout.cu_seqlens, layout.offsets)
    return out


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, layout: SequenceLayout
) -> Tensor:
    """A causal convolution, as the plain `causal_conv`."""
    return _causal_conv(x, weight, bias, activation, layout.cu_seqlens, layout.offsets)


def unit_norm(x: Tensor, scale: float) -> Tensor:
    """As the plain `unit_norm`, by the kernel of RMS norms: a vector's norm is the square root of C times its rms."""
    num_channels = x.shape[-1]
    # The weight would be rounded, the offset is not.
    zeros = x.new_zeros(num_channels)
    return add_rms_norm(x, None, zeros, UNIT_EPS / num_channels, scale * num_channels**-0.5)[1]


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """As the plain `gated_norm`."""
    return _gated_norm(x, weight, gate, eps)[0]


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    activation: Activation
    eps: float


def _chunk_indices(starts: Tensor, offsets: Tensor) -> Tensor:
    """[M, 2], the document of each chunk and its number there; `offsets` are the starts on the CPU."""
    return prepare_chunk_indices(starts, CHUNK_TOKENS, cu_seqlens_cpu=offsets)


@torch.library.custom_op("xorl::gated_delta_fla", mutates_args=())
def _gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the sums of decays inside chunks, and the inverses [T, H, L] of the chunks' systems."""
    _fix_states(k.shape[-1])
    q, k, v, g, beta = (x.contiguous()[None] for x in (q, k, v, g, beta))
    sums, out, inverses, *_ = chunk_gated_delta_rule_fwd(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=1.0,
        initial_state=None,
        output_final_state=False,
        cu_seqlens=starts,
        chunk_indices=_chunk_indices(starts, offsets),
        chunk_size=CHUNK_TOKENS,
    )
    return out[0].to(v.dtype), sums[0], inverses[0]


@_gated_delta.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return v.new_empty(v.shape), g.new_empty(g.shape), k.new_empty((*g.shape, CHUNK_TOKENS))


def _replaced(function: Callable[..., Any], **replacements: object) -> Callable[..., Any]:
    """A copy of a function with other values of some globals; the library's own stays as it is."""
    assert isinstance(function, FunctionType)
    assert replacements.keys() <= function.__globals__.keys()
    copy = FunctionType(function.__code__, {**function.__globals__, **replacements}, argdefs=function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _chunk_gradients(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    g: Tensor,
    h: Tensor,
    dv: Tensor,
    do: Tensor,
    dh: Tensor,
    scale: float,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    state_v_first: bool,
    chunk_size: int,
) -> tuple[Tensor, ...]:
    """`chunk_gradients` in the place of the library's function."""
    assert not state_v_first
    assert chunk_size == CHUNK_TOKENS
    assert w.dtype == q.dtype
    q, k, v, do, dv, g, h, dh = (x.contiguous()[0] for x in (q, k, v, do, dv, g, h, dh))
    grads = chunk_gradients(q, k, v, do, dv, g, h, dh, cu_seqlens, chunk_indices, scale)
    return tuple(grad[None] for grad in grads)


_delta_backward = _replaced(chunk_gated_delta_rule_bwd, chunk_bwd_dqkwg=_chunk_gradients)


@torch.library.custom_op("xorl::gated_delta_fla_backward", mutates_args=())
def _gated_delta_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: Tensor,
    beta: Tensor,
    inverses: Tensor,
    starts: Tensor,
    offsets: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _fix_states(k.shape[-1])
    grad, wide_q, wide_k, wide_v, sums, wide_beta, inverses = (
        x.contiguous()[None] for x in (grad, q, k, v, sums, beta, inverses)
    )
    grad_q, grad_k, grad_v, grad_beta, grad_g, *_ = _delta_backward(
        q=wide_q,
        k=wide_k,
        v=wide_v,
        g=sums,
        beta=wide_beta,
        A=inverses,
        scale=1.0,
        initial_state=None,
        do=grad,
        dht=None,
        cu_seqlens=starts,
        chunk_indices=_chunk_indices(starts, offsets),
        chunk_size=CHUNK_TOKENS,
    )
    return (
        grad_q[0].to(q.dtype),
        grad_k[0].to(k.dtype),
        grad_v[0].to(v.dtype),
        grad_g[0].to(sums.dtype),
        grad_beta[0].to(beta.dtype),
    )


@_gated_delta_backward.register_fake
def _(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:5])  # q, k, v, sums and beta


def _save_delta(ctx: _Context, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, _, beta, starts, offsets = inputs
    _, sums, inverses = output
    ctx.save_for_backward(q, k, v, sums, beta, inverses, starts, offsets)


def _differentiate_delta(ctx: _Context, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *_gated_delta_backward(grad, *ctx.saved_tensors), None, None


_gated_delta.register_autograd(_differentiate_delta, setup_context=_save_delta)


@torch.library.custom_op("xorl::causal_conv_fla", mutates_args=())
def _causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, starts: Tensor, offsets: Tensor
) -> Tensor:
    out, _ = causal_conv1d_fwd(
        x[None],
        weight.contiguous(),
        bias,
        None,
        activation=activation,
        cu_seqlens=starts,
        chunk_indices=_chunk_indices(starts, offsets),
        chunk_size=CHUNK_TOKENS,
    )
    return out[0]


@_causal_conv.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, starts: Tensor, offsets: Tensor
) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("xorl::causal_conv_fla_backward", mutates_args=())
def _causal_conv_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    starts: Tensor,
    offsets: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_weight, grad_bias, *_ = causal_conv1d_bwd(
        x.contiguous()[None],
        grad.contiguous()[None],
        None,
        weight=weight.contiguous(),
        bias=bias,
        activation=activation,
        cu_seqlens=starts,
        chunk_indices=_chunk_indices(starts, offsets),
        chunk_size=CHUNK_TOKENS,
    )
    return grad_x[0], grad_weight, weight.new_empty(0) if bias is None else grad_bias


@_causal_conv_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    starts: Tensor,
    offsets: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    of_bias = weight.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), of_bias


def _save_conv(ctx: _Context, inputs: tuple, output: Tensor) -> None:
    x, weight, bias, ctx.activation, starts, offsets = inputs
    ctx.save_for_backward(x, weight, *([] if bias is None else [bias]), starts, offsets)


def _differentiate_conv(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, *bias, starts, offsets = ctx.saved_tensors
    of_bias = bias[0] if bias else None
    *grads, grad_bias = _causal_conv_backward(grad, x, weight, of_bias, ctx.activation, starts, offsets)
    return *grads, grad_bias if bias else None, None, None, None


_causal_conv.register_autograd(_differentiate_conv, setup_context=_save_conv)


@torch.library.custom_op("xorl::gated_norm_fla", mutates_args=())
def _gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The output, and 1 / rms of each head."""
    rows, gates = (each.contiguous().view(-1, each.shape[-1]) for each in (x, gate))
    out, _, rstd, *_ = layer_norm_gated_fwd(rows, gates, weight, None, "swish", eps, is_rms_norm=True)
    return out.view(x.shape), rstd


@_gated_norm.register_fake
def _(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)


@torch.library.custom_op("xorl::gated_norm_fla_backward", mutates_args=())
def _gated_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, gate: Tensor, rstd: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    grads, rows, gates = (each.contiguous().view(-1, each.shape[-1]) for each in (grad, x, gate))
    grad_x, grad_gate, grad_weight, *_ = layer_norm_gated_bwd(
        grads, rows, gates, weight, None, "swish", eps, rstd=rstd, is_rms_norm=True
    )
    return grad_x.view(x.shape), grad_weight, grad_gate.view(x.shape)


@_gated_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, gate: Tensor, rstd: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), gate.new_empty(gate.shape)


def _save_norm(ctx: _Context, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x, weight, gate, ctx.eps = inputs
    ctx.save_for_backward(x, weight, gate, output[1])


def _differentiate_norm(ctx: _Context, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_gated_norm_backward(grad, *ctx.saved_tensors, ctx.eps), None


_gated_norm.register_autograd(_differentiate_norm, setup_context=_save_norm)

# The library has no state space with groups, so xorl's own kernels compute that.
FUNCTIONS = RecurrenceFns(gated_delta, causal_conv, unit_norm, gated_norm, space_triton.state_space)
