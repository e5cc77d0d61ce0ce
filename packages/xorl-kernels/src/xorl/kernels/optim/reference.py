"""Plain twins of triton_updates.py and triton_lists.py: the same arithmetic in torch, one block at a time.

No operation fuses a product with a sum. Otherwise the vectorised and the scalar parts of torch's CPU loops would round
differently, and an element's result would depend on its position in a shard.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from xorl.kernels.optim.noise import Noise, draw, round_stochastically
from xorl.kernels.torch_private import foreach_norm

# The fp32 copies and random words take about 60 bytes per element. This many elements fit into a core's cache; blocks
# of 2**18 take twice as long.
BLOCK = 1 << 16
_LOW_16 = 0xFFFF


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    corrections: Tensor,
    grad_scale: Tensor | None,
    skip: Tensor,
    noises: Sequence[Noise] | None,
) -> None:
    """See `updates.adamw_`. `corrections` are fp32 [tensors, 2]: 1 - beta ** step for the two betas."""
    if skip:
        return
    beta1, beta2 = betas
    factor = _inverse(grad_scale)
    for index, quad in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        correction1, correction2 = corrections[index]
        noise = None if noises is None or torch.bfloat16 not in {tensor.dtype for tensor in quad} else noises[index]
        for start, (p, g, m, v) in _blocks(*quad):
            gradient = g.float() * factor
            mean = m.float() * beta1 + gradient * (1 - beta1)
            square = v.float() * beta2 + gradient * gradient * (1 - beta2)
            denominator = (square / correction2).sqrt() + eps
            change = mean / correction1 / denominator * lr + p.float() * (lr * weight_decay)
            word, other = (None, None) if noise is None else draw(noise, start, p.numel())
            _store(p, p.float() - change, word)
            _store(m, mean, None if word is None else word >> 16)
            _store(v, square, other)


def momentum_(
    buffer: Tensor,
    grad: Tensor,
    update: Tensor | None,
    *,
    momentum: float,
    nesterov: bool,
    grad_scale: Tensor | None,
    skip: Tensor,
    noise: Noise,
) -> None:
    """See `updates.momentum_`."""
    if skip:
        return
    factor = _inverse(grad_scale)
    tensors = (buffer, grad) if update is None else (buffer, grad, update)
    for start, (b, g, *rest) in _blocks(*tensors):
        gradient = g.float() * factor * (1 - momentum)
        mean = b.float() * momentum + gradient
        for out in rest:
            out.copy_(mean * momentum + gradient if nesterov else mean)
        _store(b, mean, draw(noise, start, b.numel())[0] >> 16 if b.dtype == torch.bfloat16 else None)


def descend_(
    param: Tensor,
    update: Tensor,
    *,
    decay: float,
    rate: float,
    grad_scale: Tensor | None,
    skip: Tensor,
    noise: Noise | None,
) -> None:
    """See `updates.descend_`."""
    if skip:
        return
    factor = _inverse(grad_scale) * rate
    for start, (p, u) in _blocks(param, update):
        word = None if noise is None or p.dtype != torch.bfloat16 else draw(noise, start, p.numel())[0]
        _store(p, p.float() - (u.float() * factor + p.float() * decay), word)


def scale_(tensor: Tensor, factor: Tensor) -> None:
    """See `updates.scale_`."""
    # A 0-dim factor would be rounded to the tensor's dtype first.
    torch.mul(tensor, factor.reshape(1), out=tensor)


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """See `updates.square_sum`."""
    # A norm may be computed in a wider dtype than its tensor's, not in a narrower one.
    values = [tensor.float() if tensor.dtype == torch.float64 else tensor for tensor in tensors]
    return torch.stack(list(foreach_norm(values, 2, dtype=torch.float32))).square().sum()


def _inverse(grad_scale: Tensor | None) -> Tensor | float:
    """The factor by which gradients are multiplied."""
    return 1.0 if grad_scale is None else 1 / grad_scale


def _blocks(*tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """(index of the first element, views of the block in each tensor) of every block."""
    parts = zip(*(tensor.view(-1).split(BLOCK) for tensor in tensors), strict=True)
    return ((index * BLOCK, views) for index, views in enumerate(parts))


def _store(target: Tensor, values: Tensor, word: Tensor | None) -> None:
    """Copy fp32 values. Rounding to bf16 uses the lower 16 bits of `word`, or is to nearest if it is None."""
    if word is not None and target.dtype == torch.bfloat16:
        values = round_stochastically(values, word & _LOW_16)
    target.copy_(values)
