"""Cross entropy straight from hidden states: the logits exist one chunk of tokens at a time, forward and backward.

Shapes: T tokens, B tokens of a chunk, D model width, V vocabulary.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

IGNORE = -100


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_tokens: int = 2048
) -> tuple[Tensor, Tensor]:
    """Per-token loss and log-probability of `labels` under logits `hidden @ weight.T`.

    Logits, log-sum-exp and the accumulated gradient of the weight are in fp32 (fp64 for fp64 inputs). Peak memory is
    one chunk of logits, [chunk_tokens, V]; the backward pass recomputes each chunk.

    Args:
        hidden: [T, D].
        weight: [V, D]; cast to the dtype of `hidden`.
        labels: [T] int64, already shifted; -100 is ignored.
        chunk_tokens: tokens whose logits exist at once.

    Returns:
        (loss [T], logprob [T]), fp32: loss = -logprob, both 0 where the label is ignored. Both carry gradients.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"want hidden [T, D] and weight [V, D], got {list(hidden.shape)} and {list(weight.shape)}")
    if labels.shape != hidden.shape[:1]:
        raise ValueError(f"want one label for each of {hidden.shape[0]} tokens, got shape {list(labels.shape)}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    logprob = _LinearLogprob.apply(hidden, weight.to(hidden.dtype), labels, chunk_tokens)
    assert isinstance(logprob, Tensor)
    return -logprob, logprob


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    chunk_tokens: int


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
        trained = labels != IGNORE
        targets = labels.clamp(min=0)
        logprobs, logsumexps = [], []
        for hidden_chunk, target_chunk in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
            logits = _matmul_wide(hidden_chunk, weight.t())  # [B, V]
            logsumexp = logits.logsumexp(dim=-1)  # [B]
            logprobs.append(logits.gather(1, target_chunk[:, None]).squeeze(1) - logsumexp)
            logsumexps.append(logsumexp)
        ctx.save_for_backward(hidden, weight, targets, trained, torch.cat(logsumexps))
        ctx.chunk_tokens = chunk_tokens
        return torch.cat(logprobs).masked_fill(~trained, 0.0)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] the decorator has no types
        ctx: _Context, grad_logprob: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, targets, trained, logsumexp = ctx.saved_tensors
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        chunk_tokens = ctx.chunk_tokens
        upstream = grad_logprob.masked_fill(~trained, 0.0)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=logsumexp.dtype, device=weight.device) if needs_weight else None
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = _matmul_wide(hidden[rows], weight.t())  # [B, V]
            probs = logits.sub_(logsumexp[rows, None]).exp_()
            # d logprob / d logits = onehot(target) - probs
            grad_logits = probs.mul_(-upstream[rows, None])
            grad_logits.scatter_add_(1, targets[rows, None], upstream[rows, None])
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = _matmul_wide(grad_logits, weight).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += _matmul_wide(grad_logits.t(), hidden[rows])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _matmul_wide(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with the result, and where the device allows the inputs, in fp32; fp64 stays fp64."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
