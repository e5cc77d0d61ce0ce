"""Causal depthwise convolution over packed rows, which recurrent layers apply before their scan.

Its state is the last W - 1 inputs, zeros before the first token of a document.

Shapes: T tokens, N documents, C channels, W taps, L tokens of a chunk.
"""

from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from xorl.kernels.arguments import check_choice, check_floating, check_one_device
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.recurrent.recurrence import Recurrence, Shapes, Tensors, check_layout, checked_states

Activation = Literal["silu", None]

# Long, because a chunk takes a few launches per tap; but the backward pass holds several fp32 copies of a chunk.
CHUNK_TOKENS = 1024


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, layout: SequenceLayout
) -> Tensor:
    """Returns activation(bias + sum over i of weight[:, i] * x[t - (W - 1) + i]) inside each document: [T, C].

    It is in the dtype of x, computed in fp32 (fp64 for fp64 inputs) and rounded once. A document and the gradients of
    its tokens have the same bits in any row; the gradients of weight and bias are sums over the documents.
    Differentiable once. Autograd keeps only the inputs.

    Args:
        x: [T, C].
        weight: [C, W]; the last tap is that of the token itself.
        bias: [C], or None.
        activation: "silu", or None.
        layout: of T tokens in whole documents.

    Raises ValueError for shapes, dtypes, devices and layouts that do not fit.
    """
    return _apply(x, weight, bias, activation, layout, None, returns_states=False)[0]


def causal_conv_with_states(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    layout: SequenceLayout,
    states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `causal_conv`, but also returns the last inputs [N, W - 1, C] of each document, in fp32 (fp64 for fp64).

    `states` [N, W - 1, C] are the inputs before each document; None means zeros. All states are differentiable.
    """
    return _apply(x, weight, bias, activation, layout, states, returns_states=True)


def _apply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    layout: SequenceLayout,
    states: Tensor | None,
    *,
    returns_states: bool,
) -> tuple[Tensor, Tensor]:
    check_inputs(x, weight, bias, activation, layout)
    states = checked_states(states, (weight.shape[1] - 1, x.shape[1]), x, layout)
    parameters = (weight,) if bias is None else (weight, bias)
    return _RECURRENCES[activation]((x,), parameters, states, layout, returns_states=returns_states)


def check_inputs(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, layout: SequenceLayout
) -> None:
    """Raises ValueError for inputs that the operator would misread. Compiled code has been checked before."""
    if torch.compiler.is_compiling():
        return
    check_choice("activation", activation, Activation)
    if x.dim() != 2 or weight.dim() != 2 or len(weight) != x.shape[1] or not weight.shape[1]:
        raise ValueError(f"x must be [T, C] and weight [C, W]; got {list(x.shape)} and {list(weight.shape)}")
    if bias is not None and bias.shape != x.shape[1:]:
        raise ValueError(f"bias must be {list(x.shape[1:])}, one number per channel; got {list(bias.shape)}")
    check_layout(layout, len(x), "x")
    for name, tensor in (("x", x), ("weight", weight), ("bias", x if bias is None else bias)):
        check_floating(f"the dtype of {name}", tensor.dtype)
    check_one_device(x=x, weight=weight, bias=bias, layout=layout.cu_seqlens)


def _step(tokens: Tensors, parameters: Tensors, state: Tensor, *, activates: bool) -> tuple[Tensor, Tensor]:
    """The `Step`: the token is x, parameters are weight and perhaps bias, and the state is [W - 1, C]."""
    with_earlier = torch.cat((state, *tokens))  # [W - 1 + L, C]
    out = _convolve(with_earlier, parameters)
    return F.silu(out) if activates else out, with_earlier[len(out) :]


def _gradient(
    grad_out: Tensor, grad_next: Tensor, tokens: Tensors, parameters: Tensors, state: Tensor, *, activates: bool
) -> tuple[Tensors, Tensors, Tensor]:
    """The `StepGradient`."""
    with_earlier, length = torch.cat((state, *tokens)), len(grad_out)
    if activates:
        before = _convolve(with_earlier, parameters)
        gate = before.sigmoid()
        grad_out = grad_out * gate * (1 + before * (1 - gate))
    grad_inputs = torch.zeros_like(with_earlier)
    grad_inputs[length:] += grad_next
    grad_taps: list[Tensor] = []
    for tap, factors in enumerate(parameters[0].unbind(1)):
        grad_taps.append((grad_out * with_earlier[tap : tap + length]).sum(0))
        grad_inputs[tap : tap + length] += grad_out * factors
    grads = torch.stack(grad_taps, dim=1), grad_out.sum(0)
    return (grad_inputs[len(state) :],), grads[: len(parameters)], grad_inputs[: len(state)]


def _convolve(with_earlier: Tensor, parameters: Tensors) -> Tensor:
    """Sums the taps and the bias, if there is one: [W - 1 + L, C] -> [L, C]."""
    weight, *bias = parameters
    length = len(with_earlier) - weight.shape[1] + 1
    out = bias[0] if bias else torch.zeros_like(weight[:, 0])
    for tap, factors in enumerate(weight.unbind(1)):
        out = out + with_earlier[tap : tap + length] * factors
    return out


def _flops(tokens: Shapes, parameters: Shapes) -> int:
    return 2 * tokens[0].numel() * parameters[0][1]


def _recurrence(name: str, *, activates: bool) -> Recurrence:
    step, gradient = partial(_step, activates=activates), partial(_gradient, activates=activates)
    return Recurrence(name, step, gradient, chunk_tokens=CHUNK_TOKENS, count_flops=_flops)


_RECURRENCES: dict[Activation, Recurrence] = {
    None: _recurrence("causal_conv", activates=False),
    "silu": _recurrence("causal_conv_silu", activates=True),
}
