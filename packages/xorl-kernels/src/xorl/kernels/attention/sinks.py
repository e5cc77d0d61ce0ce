"""Attention sinks for every kernel: a correction of its output and log-sum-exp.

A kernel without sinks gives o and lse. With the score s of a sink in the softmax, lse' = log(exp(lse) + exp(s)), and
o' = o * exp(lse - lse'). Its backward pass, given o' and lse', computes the gradients of q, k and v with sinks: it uses
only the weights exp(scores - lse') and the products of o' with its gradient.

Shapes: T tokens, H heads, C channels of a head.
"""

import torch
from torch import Tensor


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(o' [T, H, C], lse' [H, T]) from a kernel's output and log-sum-exp; `out` may be overwritten. sinks: [H]."""
    if sinks is None:
        return out, lse
    with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out.mul_((lse - with_sinks).exp_().t()[..., None]), with_sinks


def grad_of_sinks(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of sinks [H], in their dtype, from o', its gradient, and lse' [H, T]."""
    # Head by head, so that only one is widened at a time.
    heads = zip(grad_out.unbind(1), out.unbind(1), strict=True)
    products = [(grad.to(lse.dtype) * one.to(lse.dtype)).sum(-1) for grad, one in heads]
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp_()
    return -(weights * torch.stack(products)).sum(1).to(sinks.dtype)
