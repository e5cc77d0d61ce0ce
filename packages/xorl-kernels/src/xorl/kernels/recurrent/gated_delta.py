"""The gated delta rule over packed rows, chunk by chunk (gated delta networks, arXiv:2412.06464).

For each document and head, with a state S [K, V] that is zero before the first token:

    S <- exp(g) S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q

Each d depends on the earlier ones, so those of a chunk are the solution of a triangular system.

Shapes: T tokens, N documents, G key heads, H value heads, K and V channels of their heads, L tokens of a chunk.
"""

from typing import NamedTuple

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


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: SequenceLayout) -> Tensor:
    """Returns the output [T, H, V] in the dtype of v, computed in fp32 (fp64 for fp64 inputs) and rounded once.

    Queries and keys are used as they are: normalise and scale them first. A document and its gradients have the same
    bits in any row. Differentiable once. Autograd keeps only the inputs; while the backward pass is in a document, it
    also holds the document's states, H * K * V numbers per 64 tokens.

    Args:
        q, k: [T, G, K]; value head h uses key head h // (H / G).
        v: [T, H, V], in the dtype of q and k.
        g: [T, H] in fp32 (fp64 for fp64 inputs), logarithms of the decays, finite and at most 0.
        beta: [T, H] in the dtype of g, the strength of the updates.
        layout: of T tokens in whole documents.

    Raises ValueError for shapes, dtypes, devices and layouts that do not fit.
    """
    return _apply(q, k, v, g, beta, layout, None, returns_states=False)[0]


def gated_delta_with_states(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: SequenceLayout, states: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `gated_delta`, but also returns the states [N, H, K, V] after each document, in the dtype of g.

    `states` [N, H, K, V] are those before each document; None means zeros. All states are differentiable.
    """
    return _apply(q, k, v, g, beta, layout, states, returns_states=True)


def _apply(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    layout: SequenceLayout,
    states: Tensor | None,
    *,
    returns_states: bool,
) -> tuple[Tensor, Tensor]:
    _check_inputs(q, k, v, g, beta, layout)
    states = checked_states(states, (v.shape[1], k.shape[2], v.shape[2]), v, layout)
    return _recurrence((v, q, k, g, beta), (), states, layout, returns_states=returns_states)


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: SequenceLayout) -> None:
    """Raises ValueError for inputs that the operator would misread. Compiled code has been checked before."""
    if torch.compiler.is_compiling():
        return
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 3 or q.shape != k.shape or len(q) != len(v):
        raise ValueError(f"q and k must be [T, G, K] and v [T, H, V]; got {shapes}")
    check_layout(layout, len(v), "q, k and v")
    if k.shape[1] == 0 or v.shape[1] % k.shape[1]:
        raise ValueError(f"the number of value heads must be a multiple of that of key heads; got {shapes}")
    for name, gate in (("g", g), ("beta", beta)):
        if gate.shape != v.shape[:2]:
            raise ValueError(
                f"{name} must be {list(v.shape[:2])}, one number per token and head; got {list(gate.shape)}"
            )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have the same dtype; got {q.dtype}, {k.dtype} and {v.dtype}")
    check_wide(v, "v", g=g, beta=beta)
    check_one_device(v=v, q=q, k=k, layout=layout.cu_seqlens)


class _Chunk(NamedTuple):
    """A chunk, heads first, with the updates d that solve (1 + couplings) @ updates = beta * errors.

    Attributes:
        q, k: [H, L, K].
        beta: [H, L, 1].
        errors: [H, L, V], v minus what k reads from the state before the chunk.
        couplings: [H, L, L]; [:, i, j] is how much of update j is subtracted from update i, 0 unless j < i.
        updates: [H, L, V].
    """

    q: Tensor
    k: Tensor
    beta: Tensor
    decays: Decays
    errors: Tensor
    couplings: Tensor
    updates: Tensor


def _solve(tokens: Tensors, state: Tensor) -> _Chunk:
    v, beta = tokens[0].transpose(0, 1), tokens[4].t()[..., None]  # [H, L, V], [H, L, 1]
    q, k = (of_each_head(x, len(state)) for x in tokens[1:3])
    decays = Decays.of(tokens[3].t())
    errors = v - decays.before * (k @ state)
    couplings = (beta * (k @ k.transpose(1, 2)) * decays.between).tril(-1)
    updates = torch.linalg.solve_triangular(couplings, beta * errors, upper=False, unitriangular=True)
    return _Chunk(q, k, beta, decays, errors, couplings, updates)


def _step(tokens: Tensors, parameters: Tensors, state: Tensor) -> tuple[Tensor, Tensor]:
    """The `Step`: tokens are v, q, k, g and beta, and the state is [H, K, V]."""
    chunk = _solve(tokens, state)
    out, state = read_and_write(chunk.q, chunk.k, chunk.updates, chunk.decays, state)
    return out.transpose(0, 1), state


def _gradient(
    grad_out: Tensor, grad_next: Tensor, tokens: Tensors, parameters: Tensors, state: Tensor
) -> tuple[Tensors, Tensors, Tensor]:
    """The `StepGradient`."""
    q, k, beta, decays, errors, couplings, updates = _solve(tokens, state)
    grads = read_and_write_gradients(grad_out.transpose(0, 1), grad_next, q, k, updates, decays, state)
    transposed = couplings.transpose(1, 2)
    grad_solved = torch.linalg.solve_triangular(transposed, grads.updates, upper=True, unitriangular=True)
    grad_couplings = -(grad_solved @ updates.transpose(1, 2)).tril(-1)
    grad_v = beta * grad_solved  # also that of `errors`
    grad_read = -decays.before * grad_v  # of k @ state
    products = k @ k.transpose(1, 2)
    grad_products = beta * grad_couplings * decays.between
    grad_k = grads.k + grad_read @ state.transpose(1, 2) + (grad_products + grad_products.transpose(1, 2)) @ k
    grad_beta = (grad_solved * errors).sum(-1) + (grad_couplings * products * decays.between).sum(-1)
    grad_g = decays.gradient(
        grads.decays._replace(
            between=grads.decays.between + beta * grad_couplings * products,
            before=grads.decays.before - (grad_v * (k @ state)).sum(-1, keepdim=True),
        )
    )
    num_groups = tokens[1].shape[1]
    grad_q, grad_k = (of_each_group(x, num_groups) for x in (grads.q, grad_k))
    return (
        (grad_v.transpose(0, 1), grad_q, grad_k, grad_g.t(), grad_beta.t()),
        (),
        grads.state + k.transpose(1, 2) @ grad_read,
    )


def _flops(tokens: Shapes, parameters: Shapes) -> int:
    """Counts S^T k, k d^T and S^T q for each token and head, as the recurrence has them; chunks do more work."""
    (num_tokens, num_heads, v_channels), (_, _, k_channels) = tokens[:2]
    return 6 * num_tokens * num_heads * k_channels * v_channels


_recurrence = Recurrence("gated_delta", _step, _gradient, chunk_tokens=CHUNK_TOKENS, count_flops=_flops)
