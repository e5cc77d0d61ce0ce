"""Cross-entropy computed from hidden states; logits exist for only one chunk of tokens at a time.

Shapes: T tokens, B tokens of a chunk, P tokens of a part of a chunk, D model width, V vocabulary.

Precision:
- Matrix products use the dtype of `hidden` (the operand dtype), to which the weight is cast, and accumulate in fp32.
- The softmax is computed in fp32, and so is a cap on logits. Logits are kept in fp32 or, without `LogitOptions.fp32`,
  rounded to the operand dtype before the cap.
- The gradient of the logits, before its factor per token, is computed in fp32 and rounded to the operand dtype. The
  label's element is about as large as all others together, so the gradients of hidden states and weight correct its
  rounding error in fp32.
- The gradient of a hidden state is a product times the factor per token, rounded once.
- The weight's gradient uses the hidden state times the factor, rounded to the operand dtype. Up to 8 chunks (16,384
  tokens of a 151,936 vocabulary) accumulate in the operand dtype, with one rounding per chunk. More chunks, or an fp32
  weight, accumulate in fp32.
- fp64 inputs are computed in fp64 throughout.
"""

import math
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from xorl.kernels.arguments import check_at_least, check_one_device, check_type, is_readable
from xorl.kernels.fused import reference, triton_refusal
from xorl.kernels.fused.reference import IGNORE, PartLosses, RowLosses
from xorl.kernels.head import AnyHead, HeadWeight
from xorl.kernels.layout import RankGroup
from xorl.kernels.vocabulary import Vocabulary, combine

__all__ = ["IGNORE", "linear_cross_entropy", "linear_cross_entropy_scores", "linear_cross_entropy_sum", "wide_logits"]

# Memory limits for the logits of a part and for the gradient of a chunk. Chunks are larger because each one reads and
# writes the weight's gradient once.
LOGITS_BYTES = int(0.3 * 2**30)
GRADIENT_BYTES = int(0.6 * 2**30)
ROW_MULTIPLE = 128  # rows in a tile of a matrix product
# How often the weight's gradient may be rounded, by up to half a unit in the last place each time. Twice as many
# roundings would cost another bit.
MAX_ROUNDINGS = 8
_Options = tuple[bool, float | None, int, int, int, int, str]  # of the operator, from `logits_fp32` to `group_name`
COLUMN_MULTIPLE = 64  # aligns buffer rows to cache lines for any vocabulary size


def linear_cross_entropy(
    hidden: Tensor,
    head: AnyHead,
    labels: Tensor,
    *,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss and log-probability of each token; both accept any gradient in the backward pass.

    If the weight is trained, the backward pass computes the logits a second time. If it is frozen, the forward pass
    computes the gradient of each token's hidden state, and the backward pass multiplies it by the gradient of the
    token's loss, with one more rounding. If only the sum of the losses is backpropagated and the weight is trained,
    `linear_cross_entropy_sum` saves one of four matrix products.

    Args:
        hidden: [T, D].
        head: the weight [V, D], alone or with options. If ranks share the vocabulary, labels are of the whole one, and
            results are the same on all ranks, but the gradient of `hidden` has the terms of this rank's tokens only;
            then it is collective.
        labels: [T] int64, already shifted, each in [0, V) or -100, which is ignored. On a GPU these are not checked,
            since the host would wait: another label gives undefined results, or an error of the device.
        chunk_tokens: maximum number of tokens whose gradients of the logits exist at once. By default as many as fit
            into 0.6 GiB, plus 0.3 GiB of logits if they have a different dtype.

    Returns:
        (loss [T], logprob [T]) in fp32: loss = -logprob; both are 0 for ignored labels.

    Raises:
        ValueError: shapes or devices do not fit, or a label on the CPU is neither in [0, V) nor -100.
    """
    head = HeadWeight.of(head)
    rows_at_once = _check(hidden, head, labels, chunk_tokens)
    computes_gradient = torch.is_grad_enabled() and hidden.requires_grad and not head.weight.requires_grad
    loss = _LossPerToken.apply(hidden, head.weight, labels, _flat(head, rows_at_once), computes_gradient)
    assert isinstance(loss, Tensor)
    return loss, -loss


def linear_cross_entropy_sum(
    hidden: Tensor,
    head: AnyHead,
    labels: Tensor,
    *,
    token_weight: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum of the losses, each multiplied by its `token_weight`, and the losses themselves.

    The forward pass computes the gradients chunk by chunk, while the logits exist: three matrix products instead of
    four, and no memory beyond the two gradients and one chunk. The backward pass multiplies the gradients by that of
    the sum, in place and only if it is not 1, so it can run only once.

    Args:
        token_weight: [T], not differentiated; None means 1.
        Others as for `linear_cross_entropy`.

    Returns:
        (sum, a scalar; loss [T], not differentiable and not multiplied by token_weight), both fp32.

    Raises:
        ValueError: shapes or devices do not fit, or a label on the CPU is neither in [0, V) nor -100.
    """
    head = HeadWeight.of(head)
    rows_at_once = _check(hidden, head, labels, chunk_tokens)
    if token_weight is not None and token_weight.shape != labels.shape:
        raise ValueError(
            f"token_weight must have the shape of labels, {list(labels.shape)}, got {list(token_weight.shape)}"
        )
    has_gradient = torch.is_grad_enabled()
    total, loss = _SumOfLosses.apply(
        hidden,
        head.weight,
        labels,
        token_weight,
        _flat(head, rows_at_once),
        has_gradient and hidden.requires_grad,
        has_gradient and head.weight.requires_grad,
    )
    return total, loss


@torch.no_grad()
def linear_cross_entropy_scores(
    hidden: Tensor,
    head: AnyHead,
    labels: Tensor,
    *,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(loss [T] fp32, correct [T] bool) without gradients; `correct` means that the label is the most likely token.

    Arguments and errors as for `linear_cross_entropy`. Ignored labels get 0 and False.
    """
    head = HeadWeight.of(head)
    rows_at_once = _check(hidden, head, labels, chunk_tokens)
    loss, correct, _, _ = _linear_cross_entropy(
        hidden, head.weight, labels, None, *_flat(head, rows_at_once), False, False
    )
    return loss, correct


@torch.no_grad()
def wide_logits(hidden: Tensor, head: AnyHead) -> Tensor:
    """Logits [T, V] of hidden [T, D] and a head, computed as in the losses; not differentiable.

    The product uses the dtype of `hidden`, accumulates in fp32 and returns fp32 (fp64 throughout for fp64), also for a
    head that would round its logits.

    Raises ValueError for shapes, dtypes or devices that do not fit, and for a head of which ranks have parts.
    """
    head = HeadWeight.of(head)
    if head.logits.vocab is not None:
        raise ValueError("head: is a part of the vocabulary; gather the whole weight to compute logits")
    weight = head.weight
    _check_product(hidden, weight)
    check_one_device(hidden=hidden, weight=weight)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = torch.empty(hidden.shape[0], weight.shape[0], dtype=wide, device=hidden.device)
    _matmul_into_(logits, hidden, weight.to(hidden.dtype).t())
    cap = head.logits.softcap
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _flat(head: HeadWeight, rows_at_once: int) -> _Options:
    """The options of the operator."""
    vocab, logits = head.vocab, head.logits
    return logits.fp32, logits.softcap, rows_at_once, vocab.size, vocab.group.rank, vocab.group.size, vocab.group.name


def _check(hidden: Tensor, head: HeadWeight, labels: Tensor, chunk_tokens: int | None) -> int:
    """Check what the host knows; returns `chunk_tokens`, or 0 for None. Raises ValueError."""
    weight, vocab = head.weight, head.vocab
    _check_product(hidden, weight)
    check_type("labels", labels, Tensor, "torch.tensor([5, -100])")
    if labels.shape != hidden.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"labels must have shape [{hidden.shape[0]}], one per token, in int64; got {list(labels.shape)} in "
            f"{labels.dtype}"
        )
    if len(weight) != len(vocab.held):
        raise ValueError(f"vocab: this rank has {len(vocab.held)} of {vocab.size} tokens, not {len(weight)}, as weight")
    check_one_device(hidden=hidden, weight=weight, labels=labels)
    if is_readable(labels):
        is_wrong = ((labels < 0) | (labels >= vocab.size)) & (labels != IGNORE)
        if is_wrong.any():
            token = int(is_wrong.int().argmax())
            raise ValueError(
                f"labels: {int(labels[token])} at token {token} is not in the vocabulary of {vocab.size}; use "
                f"{IGNORE} for tokens that are not trained"
            )
    check_at_least("chunk_tokens", chunk_tokens, 1, optional=True)
    if (softcap := head.logits.softcap) is not None and not softcap > 0:
        raise ValueError(f"softcap: must be above 0, or None for no cap, got {softcap!r}")
    return chunk_tokens or 0


def _check_product(hidden: Tensor, weight: Tensor) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"expected hidden [T, D] and weight [V, D], got {list(hidden.shape)} and {list(weight.shape)}")
    if not hidden.is_floating_point() or not weight.is_floating_point():
        raise ValueError(f"hidden and weight must be of floating point; got {hidden.dtype} and {weight.dtype}")


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    options: _Options


class _LossPerToken(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        options: _Options,
        computes_gradient: bool,
    ) -> Tensor:
        loss, _, grad_hidden, _ = _linear_cross_entropy(
            hidden, weight, labels, None, *options, computes_gradient, False
        )
        ctx.save_for_backward(*([grad_hidden] if computes_gradient else [hidden, weight, labels]))
        ctx.options = options
        return loss

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] the decorator has no types
        ctx: _Context, grad_loss: Tensor
    ) -> tuple[Tensor | None, ...]:
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        if len(ctx.saved_tensors) == 1:
            (saved,) = ctx.saved_tensors  # [T, D]
            # Not in place, since a retained graph may run backward again. With `out`, no intermediate copy in fp32.
            grad_hidden, grad_weight = torch.mul(saved, grad_loss[:, None], out=torch.empty_like(saved)), None
        else:
            hidden, weight, labels = ctx.saved_tensors
            _, _, grad_hidden, grad_weight = _linear_cross_entropy(
                hidden, weight, labels, grad_loss, *ctx.options, needs_hidden, needs_weight
            )
        gradients = (grad_hidden if needs_hidden else None, grad_weight if needs_weight else None)
        return (*gradients, None, None, None)


class _SumOfLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        token_weight: Tensor | None,
        options: _Options,
        needs_hidden: bool,
        needs_weight: bool,
    ) -> tuple[Tensor, Tensor]:
        loss, _, grad_hidden, grad_weight = _linear_cross_entropy(
            hidden, weight, labels, token_weight, *options, needs_hidden, needs_weight
        )
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(loss)
        return (loss if token_weight is None else loss * token_weight).sum(), loss

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] the decorator has no types
        ctx: _Context, grad_sum: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = []
        for gradient, is_needed in zip(ctx.saved_tensors, ctx.needs_input_grad[:2], strict=True):
            if is_needed:
                # In place: a second copy of the weight's gradient would be the largest tensor of the step.
                _scale_(gradient, grad_sum)
            gradients.append(gradient if is_needed else None)
        return (*gradients, None, None, None, None, None)


@torch.library.custom_op("xorl::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weight: Tensor | None,
    logits_fp32: bool,
    softcap: float | None,
    rows_at_once: int,
    vocab_size: int,
    rank: int,
    num_ranks: int,
    group_name: str,
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss [T], correct [T], gradients of sum(loss * token_weight) for hidden [T, D] and weight [V, D]).

    Gradients that are not needed are empty. It is an operator so that torch.compile does not break it up.
    """
    operand_dtype, num_tokens, num_held = hidden.dtype, hidden.shape[0], weight.shape[0]
    vocab = Vocabulary(vocab_size, RankGroup(rank, num_ranks, group_name))
    is_shared = num_ranks > 1
    own_labels = vocab.local(labels) if is_shared else labels.contiguous()
    logits_dtype = torch.promote_types(operand_dtype, torch.float32) if logits_fp32 else operand_dtype
    computes_gradient = needs_hidden or needs_weight
    in_place = computes_gradient and logits_dtype == operand_dtype
    if computes_gradient:
        chunk = rows_at_once or chunk_rows(num_tokens, vocab.share * operand_dtype.itemsize, GRADIENT_BYTES)
        part = chunk if in_place else chunk_rows(min(chunk, num_tokens), vocab.share * logits_dtype.itemsize)
    else:
        chunk = part = rows_at_once or chunk_rows(num_tokens, vocab.share * logits_dtype.itemsize)

    results = _empty_row_losses(hidden)
    grad_hidden, grad_weight = _gradients(hidden, weight, needs_hidden, needs_weight)
    accumulates_wide = weight.dtype == torch.float32 or num_tokens > MAX_ROUNDINGS * chunk
    sum_dtype = torch.promote_types(operand_dtype, torch.float32) if accumulates_wide else operand_dtype
    weight_sum = grad_weight if sum_dtype == grad_weight.dtype else torch.empty_like(grad_weight, dtype=sum_dtype)
    if num_tokens == 0:
        weight_sum.zero_()
    weight = weight.to(operand_dtype)
    logits_buffer = _rows_buffer(min(part, num_tokens), num_held, logits_dtype, hidden.device)
    gradient_buffer = logits_buffer if in_place else None
    if computes_gradient and not in_place:
        gradient_buffer = _rows_buffer(min(chunk, num_tokens), num_held, operand_dtype, hidden.device)
    kernels = _kernels(logits_buffer)
    # The gradient at the label is stored rounded, or without the part that needs the other ranks' logits.
    corrects = computes_gradient and (is_shared or operand_dtype.itemsize < 4)
    for start in range(0, num_tokens, chunk):
        rows = slice(start, min(start + chunk, num_tokens))
        gradient = None if gradient_buffer is None else gradient_buffer[: rows.stop - start]  # [B, V]
        of_part = PartLosses.empty(rows.stop - start, results.loss.dtype, hidden.device) if is_shared else None
        for first in range(start, rows.stop, part):
            tokens = slice(first, min(first + part, rows.stop))
            logits = logits_buffer[: tokens.stop - first]  # [P, V]
            _matmul_into_(logits, hidden[tokens], weight.t())
            own_gradient = None if gradient is None else gradient[first - start : tokens.stop - start]
            if of_part is not None:
                own = of_part.rows(first - start, tokens.stop - start)
                kernels.cross_entropy_part(logits, own_labels[tokens], own_gradient, own, softcap)
                continue
            weights = None if token_weight is None else token_weight[tokens]
            kernels.cross_entropy_rows(
                logits, own_labels[tokens], weights, own_gradient, results.rows(first, tokens.stop), softcap
            )
        if of_part is not None:
            weights = None if token_weight is None else token_weight[rows]
            combine(of_part, labels[rows], weights, vocab, results.rows(rows.start, rows.stop), softcap)
        if gradient is not None and needs_hidden:
            # Output in fp32, because torch may split the sum over the vocabulary and add the parts in the output dtype.
            product = torch.empty(len(gradient), hidden.shape[1], dtype=results.loss.dtype, device=hidden.device)
            _matmul_into_(product, gradient, weight)
            product.mul_(results.scale[rows, None])
            if corrects:
                weight_at_labels = weight.index_select(0, own_labels[rows].clamp(0, num_held - 1))
                product.addcmul_(weight_at_labels.to(product.dtype), results.label_error[rows, None])
            grad_hidden[rows] = product
        if gradient is not None and needs_weight:
            scaled = torch.mul(hidden[rows], results.scale[rows, None], out=torch.empty_like(hidden[rows]))
            # The factor of an ignored token is 0, but 0 times a non-finite hidden state is NaN.
            scaled.masked_fill_((labels[rows] == IGNORE)[:, None], 0)
            _matmul_into_(weight_sum, gradient.t(), scaled, add=start > 0)
    if corrects and needs_weight:
        kernels.add_at_labels_(weight_sum, hidden.contiguous(), own_labels, results.label_error)
    if weight_sum is not grad_weight:
        grad_weight.copy_(weight_sum)
    return results.loss, results.correct, grad_hidden, grad_weight


@_linear_cross_entropy.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weight: Tensor | None,
    logits_fp32: bool,
    softcap: float | None,
    rows_at_once: int,
    vocab_size: int,
    rank: int,
    num_ranks: int,
    group_name: str,
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    results = _empty_row_losses(hidden)
    return results.loss, results.correct, *_gradients(hidden, weight, needs_hidden, needs_weight)


@torch.library.custom_op("xorl::scale_", mutates_args=("x",))
def _scale_(x: Tensor, factor: Tensor) -> None:
    if triton_refusal(x.device.type) is None and x.dtype != torch.float64:
        # Needs Triton.
        from xorl.kernels.fused.cross_entropy import scale_  # noqa: PLC0415

        scale_(x, factor)
    else:
        x.mul_(factor)


def chunk_rows(num_tokens: int, bytes_per_row: int, limit_bytes: int = LOGITS_BYTES) -> int:
    """Tokens per chunk: as few chunks of equal size as possible, each with at most `limit_bytes` of rows."""
    limit = max(limit_bytes // bytes_per_row, 1)
    limit = limit // ROW_MULTIPLE * ROW_MULTIPLE or limit
    num_chunks = max(math.ceil(num_tokens / limit), 1)
    rows = math.ceil(num_tokens / num_chunks / ROW_MULTIPLE) * ROW_MULTIPLE
    return max(min(rows, limit), 1)


def _empty_row_losses(hidden: Tensor) -> RowLosses:
    return RowLosses.empty(hidden.shape[0], torch.promote_types(hidden.dtype, torch.float32), hidden.device)


def _gradients(hidden: Tensor, weight: Tensor, needs_hidden: bool, needs_weight: bool) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(hidden.shape if needs_hidden else (0,), dtype=hidden.dtype, device=hidden.device),
        torch.empty(weight.shape if needs_weight else (0,), dtype=weight.dtype, device=hidden.device),
    )


def _rows_buffer(num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised [num_rows, num_columns]; every row starts at an aligned address."""
    stride = math.ceil(num_columns / COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    return torch.empty(num_rows, stride, dtype=dtype, device=device)[:, :num_columns]


def _kernels(logits: Tensor) -> ModuleType:
    """The module that implements `cross_entropy_rows` and `add_at_labels_`: the kernels, or their plain twins."""
    if triton_refusal(logits.device.type) is not None or logits.dtype == torch.float64:
        return reference
    # Needs Triton.
    from xorl.kernels.fused import cross_entropy  # noqa: PLC0415

    return cross_entropy


def _matmul_into_(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """Write a @ b into `out`, or add it to `out`; accumulates in fp32 (fp64 for fp64) and rounds once."""
    if a.device.type != "cuda" and a.dtype.itemsize < 4:
        product = a.float() @ b.float()
        _ = out.add_(product) if add else out.copy_(product)
    elif out.dtype == a.dtype:
        _ = out.addmm_(a, b) if add else torch.mm(a, b, out=out)
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
