"""The state-space scan of Mamba-2 over packed rows, chunk by chunk (SSD, arXiv:2405.21060).

For each document and head, with a state S [N, P] that is zero before the first token:

    S <- exp(dt A) S + dt B x^T;  y = S^T C + D x

This is the gated delta rule with d = dt x, queries C, keys B and decays exp(dt A).

Shapes: T tokens, M documents, H heads of P channels, G groups of heads, N channels of a group's states, L tokens of a
chunk.
"""

import torch
from torch import Tensor

from xorl.kernels.arguments import check_one_device
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.recurrent.decay import (
    CHUNK_TOKENS,
    Decays,
    of_each_group,
    of_each_head,
    read_and_write,
    read_and_write_gradients,
)
from xorl.kernels.recurrent.recurrence import Recurrence, Shapes, Tensors, check_layout, check_wide, checked_states


def state_space(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, layout: SequenceLayout) -> Tensor:
    """Returns the output y [T, H, P] in the dtype of x, computed in fp32 (fp64 for fp64 inputs) and rounded once.

    A document and the gradients of its tokens have the same bits in any row; the gradients of a and d are sums over the
    documents. Differentiable once. Autograd keeps only the inputs; while the backward pass is in a document, it also
    holds the document's states, H * N * P numbers per 64 tokens.

    Args:
        x: [T, H, P].
        dt: [T, H] in fp32 (fp64 for fp64 inputs), the step sizes, after the softplus.
        a: [H] in the dtype of dt, finite and negative, usually -exp(A_log).
        b, c: [T, G, N] in the dtype of x; head h uses group h // (H / G).
        d: [H] in the dtype of dt, the factor on x in the output.
        layout: of T tokens in whole documents.

    Raises ValueError for shapes, dtypes, devices and layouts that do not fit.
    """
    return _apply(x, dt, a, b, c, d, layout, None, returns_states=False)[0]


def state_space_with_states(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    layout: SequenceLayout,
    states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `state_space`, but also returns the states [M, H, N, P] after each document, in the dtype of dt.

    `states` [M, H, N, P] are those before each document; None means zeros. All states are differentiable.
    """
    return _apply(x, dt, a, b, c, d, layout, states, returns_states=True)


def _apply(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    layout: SequenceLayout,
    states: Tensor | None,
    *,
    returns_states: bool,
) -> tuple[Tensor, Tensor]:
    check_inputs(x, dt, a, b, c, d, layout)
    states = checked_states(states, (x.shape[1], b.shape[2], x.shape[2]), x, layout)
    return _recurrence((x, dt, b, c), (a, d), states, layout, returns_states=returns_states)


def check_inputs(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, layout: SequenceLayout) -> None:
    """Raises ValueError for inputs that the operator would misread. Compiled code has been checked before."""
    if torch.compiler.is_compiling():
        return
    shapes = f"x {list(x.shape)}, b {list(b.shape)}, c {list(c.shape)}"
    if not x.dim() == b.dim() == c.dim() == 3 or b.shape != c.shape or len(b) != len(x):
        raise ValueError(f"x must be [T, H, P], and b and c [T, G, N]; got {shapes}")
    check_layout(layout, len(x), "x, b and c")
    if b.shape[1] == 0 or x.shape[1] % b.shape[1]:
        raise ValueError(f"the number of heads must be a multiple of that of groups; got {shapes}")
    for name, tensor, shape in (("dt", dt, x.shape[:2]), ("a", a, x.shape[1:2]), ("d", d, x.shape[1:2])):
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {list(shape)} for x {list(x.shape)}; got {list(tensor.shape)}")
    if not x.dtype == b.dtype == c.dtype:
        raise ValueError(f"x, b and c must have the same dtype; got {x.dtype}, {b.dtype} and {c.dtype}")
    check_wide(x, "x", dt=dt, a=a, d=d)
    check_one_device(x=x, b=b, c=c, layout=layout.cu_seqlens)


def _step(tokens: Tensors, parameters: Tensors, state: Tensor) -> tuple[Tensor, Tensor]:
    """The `Step`: tokens are x, dt, b and c, parameters are a and d, and the state is [H, N, P]."""
    x, dt, b, c = _heads_first(tokens, len(state))
    a, d = parameters
    out, state = read_and_write(c, b, dt[..., None] * x, Decays.of(dt * a[:, None]), state)
    return (out + d[:, None, None] * x).transpose(0, 1), state


def _gradient(
    grad_out: Tensor, grad_next: Tensor, tokens: Tensors, parameters: Tensors, state: Tensor
) -> tuple[Tensors, Tensors, Tensor]:
    """The `StepGradient`."""
    x, dt, b, c = _heads_first(tokens, len(state))
    (a, d), grad_out = parameters, grad_out.transpose(0, 1)
    decays = Decays.of(dt * a[:, None])
    grads = read_and_write_gradients(grad_out, grad_next, c, b, dt[..., None] * x, decays, state)
    grad_g = decays.gradient(grads.decays)  # [H, L], of dt * a
    grad_x = dt[..., None] * grads.updates + d[:, None, None] * grad_out
    grad_dt = (grads.updates * x).sum(-1) + grad_g * a[:, None]
    grad_b, grad_c = (of_each_group(grad, tokens[2].shape[1]) for grad in (grads.k, grads.q))
    of_parameters = (grad_g * dt).sum(-1), (grad_out * x).sum((1, 2))
    return (grad_x.transpose(0, 1), grad_dt.t(), grad_b, grad_c), of_parameters, grads.state


def _heads_first(tokens: Tensors, num_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [H, L, P], dt [H, L], b and c [H, L, N]."""
    b, c = (of_each_head(x, num_heads) for x in tokens[2:])
    return tokens[0].transpose(0, 1), tokens[1].t(), b, c


def count_flops(tokens: Shapes, parameters: Shapes) -> int:
    """Counts B x^T and S^T C for each token and head, as the recurrence has them; chunks do more work."""
    num_tokens, num_heads, x_channels = tokens[0]
    return 4 * num_tokens * num_heads * x_channels * tokens[2][2]


_recurrence = Recurrence("state_space", _step, _gradient, chunk_tokens=CHUNK_TOKENS, count_flops=count_flops)
