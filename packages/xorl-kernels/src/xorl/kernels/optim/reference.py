"""The plain twins of the kernels in triton_updates.py: the same arithmetic in torch, a block at a time.

No operation fuses a product with a sum: the vectorised and the scalar parts of torch's CPU loops would then round
differently, and an element's value would depend on where in a shard it stands.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from xorl.kernels.optim.noise import Noise, draw, round_stochastically

# Keeps the fp32 copies and the random words, some 60 bytes an element, in a core's cache: half the time of 2**18.
BLOCK = 1 << 16
_LOW_16 = 0xFFFF


def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    corrections: Tensor,
    skip: Tensor,
    noise: Noise,
) -> None:
    """See `updates.adamw_`."""
    if skip:
        return
    beta1, beta2 = betas
    rounds = torch.bfloat16 in (param.dtype, exp_avg.dtype, exp_avg_sq.dtype)
    for start, (p, g, m, v) in _blocks(param, grad, exp_avg, exp_avg_sq):
        gradient = g.float()
        mean = m.float() * beta1 + gradient * (1 - beta1)
        square = v.float() * beta2 + gradient * gradient * (1 - beta2)
        denominator = (square / corrections[1]).sqrt() + eps
        value = p.float() * (1 - lr * weight_decay) - mean / corrections[0] / denominator * lr
        word, other = draw(noise, start, p.numel()) if rounds else (None, None)
        _store(p, value, word)
        _store(m, mean, None if word is None else word >> 16)
        _store(v, square, other)


def momentum_(
    buffer: Tensor,
    grad: Tensor,
    update: Tensor | None,
    *,
    momentum: float,
    nesterov: bool,
    skip: Tensor,
    noise: Noise,
) -> None:
    """See `updates.momentum_`."""
    if skip:
        return
    tensors = (buffer, grad) if update is None else (buffer, grad, update)
    for start, (b, g, *rest) in _blocks(*tensors):
        gradient = g.float() * (1 - momentum)
        mean = b.float() * momentum + gradient
        for out in rest:
            out.copy_(mean * momentum + gradient if nesterov else mean)
        _store(b, mean, draw(noise, start, b.numel())[0] >> 16 if b.dtype == torch.bfloat16 else None)


def descend_(param: Tensor, update: Tensor, *, keep: float, rate: float, skip: Tensor, noise: Noise) -> None:
    """See `updates.descend_`."""
    if skip:
        return
    for start, (p, u) in _blocks(param, update):
        value = p.float() * keep - u.float() * rate
        _store(p, value, draw(noise, start, p.numel())[0] if p.dtype == torch.bfloat16 else None)


def scale_(tensor: Tensor, factor: Tensor) -> None:
    """See `updates.scale_`."""
    # A 0-dim factor would be rounded to the tensor's dtype first.
    torch.mul(tensor, factor.reshape(1), out=tensor)


def _blocks(*tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """(first element, views of a block of each)."""
    parts = zip(*(tensor.view(-1).split(BLOCK) for tensor in tensors), strict=True)
    return ((index * BLOCK, views) for index, views in enumerate(parts))


def _store(target: Tensor, values: Tensor, word: Tensor | None) -> None:
    """Copy fp32 values, rounded by the lower 16 bits of `word` where the target is bf16."""
    if target.dtype == torch.bfloat16:
        assert word is not None
        values = round_stochastically(values, word & _LOW_16)
    target.copy_(values)
