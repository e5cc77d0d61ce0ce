"""The updates as Triton kernels: each reads and writes every tensor once, and draws its random bits in registers.

Imported only where Triton is. `reference.py` has the plain twins, and `updates.py` the contracts.
"""

import triton
import triton.language as tl
from torch import Tensor

from xorl.kernels.fused.device import launch
from xorl.kernels.optim.noise import KEY_STEP, MULTIPLIER, ROUNDS, Noise

BLOCK = 1024
_KEY_STEP = tl.constexpr(KEY_STEP)
_MULTIPLIER = tl.constexpr(MULTIPLIER)
_ROUNDS = tl.constexpr(ROUNDS)


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
    beta1, beta2 = betas
    rates = (lr, 1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, eps)
    count = param.numel()
    tensors = (param, grad, exp_avg, exp_avg_sq, corrections, skip, noise.step)
    launch(_adamw, _grid(count), *tensors, count, noise.key, noise.first, *rates, num_warps=4, BLOCK=BLOCK)


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
    count = buffer.numel()
    tensors = (buffer, grad, buffer if update is None else update, skip, noise.step)
    rates = (momentum, 1 - momentum)
    flags = {"NESTEROV": nesterov, "WANTED": update is not None}
    launch(_momentum, _grid(count), *tensors, count, noise.key, noise.first, *rates, num_warps=4, **flags, BLOCK=BLOCK)


def descend_(param: Tensor, update: Tensor, *, keep: float, rate: float, skip: Tensor, noise: Noise) -> None:
    """See `updates.descend_`."""
    count = param.numel()
    tensors = (param, update, skip, noise.step)
    launch(_descend, _grid(count), *tensors, count, noise.key, noise.first, keep, rate, num_warps=4, BLOCK=BLOCK)


def scale_(tensor: Tensor, factor: Tensor) -> None:
    """See `updates.scale_`."""
    launch(_scale, _grid(tensor.numel()), tensor, factor, tensor.numel(), num_warps=4, BLOCK=BLOCK)


def _grid(count: int) -> tuple[int]:
    return (-(-count // BLOCK),)


@triton.jit
def draw(index: tl.tensor, step: tl.tensor, key: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The two words of `noise.draw` for int64 indices; dequantised weights draw their noise by it too."""
    low = index.to(tl.uint32)
    high = tl.full(low.shape, 0, tl.uint32) + step.to(tl.uint32)
    multiplier = tl.full(low.shape, _MULTIPLIER, tl.uint32)
    key_step = tl.full(low.shape, _KEY_STEP, tl.uint32)
    key = (index >> 32).to(tl.uint32) * key_step + key.to(tl.uint32)
    for _ in tl.static_range(_ROUNDS):  # pyright: ignore[reportGeneralTypeIssues]
        upper = tl.umulhi(low, multiplier)
        lower = low * multiplier
        low = upper ^ key ^ high
        high = lower
        key = key + key_step
    return low, high


@triton.jit
def _store(pointer: tl.tensor, offsets: tl.tensor, values: tl.tensor, word: tl.tensor, mask: tl.tensor) -> None:
    """fp32 values, rounded by the lower 16 bits of `word` where the target is bf16."""
    if pointer.dtype.element_ty == tl.bfloat16:  # pyright: ignore[reportAttributeAccessIssue] it is a pointer's
        raw = values.to(tl.uint32, bitcast=True)
        raw = tl.where(values == values, raw + (word & 0xFFFF), raw)
        halves = (raw >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        tl.store(pointer + offsets, halves, mask=mask)
    else:
        tl.store(pointer + offsets, values, mask=mask)


@triton.jit(do_not_specialize=["key", "first"])
def _adamw(
    param: tl.tensor,
    grad: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    corrections: tl.tensor,
    skip: tl.tensor,
    step: tl.tensor,
    count: int,
    key: int,
    first: int,
    lr: float,
    keep: float,
    beta1: float,
    rest1: float,
    beta2: float,
    rest2: float,
    eps: float,
    BLOCK: tl.constexpr,
) -> None:
    if tl.load(skip) != 0:
        return
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    gradient = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32)
    mean = tl.load(exp_avg + offsets, mask=mask, other=0.0).to(tl.float32) * beta1 + gradient * rest1
    square = tl.load(exp_avg_sq + offsets, mask=mask, other=0.0).to(tl.float32) * beta2 + gradient * gradient * rest2
    denominator = tl.sqrt(square / tl.load(corrections + 1)) + eps
    value = tl.load(param + offsets, mask=mask, other=0.0).to(tl.float32) * keep
    value = value - mean / tl.load(corrections) / denominator * lr
    word, other = draw(offsets + first, tl.load(step), key)  # pyright: ignore[reportGeneralTypeIssues]
    _store(param, offsets, value, word, mask)
    _store(exp_avg, offsets, mean, word >> 16, mask)
    _store(exp_avg_sq, offsets, square, other, mask)


@triton.jit(do_not_specialize=["key", "first"])
def _momentum(
    buffer: tl.tensor,
    grad: tl.tensor,
    update: tl.tensor,
    skip: tl.tensor,
    step: tl.tensor,
    count: int,
    key: int,
    first: int,
    momentum: float,
    rest: float,
    NESTEROV: tl.constexpr,
    WANTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    if tl.load(skip) != 0:
        return
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    gradient = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32) * rest
    mean = tl.load(buffer + offsets, mask=mask, other=0.0).to(tl.float32) * momentum + gradient
    if WANTED:
        direction = mean * momentum + gradient if NESTEROV else mean
        tl.store(update + offsets, direction, mask=mask)
    word, _ = draw(offsets + first, tl.load(step), key)  # pyright: ignore[reportGeneralTypeIssues]
    _store(buffer, offsets, mean, word >> 16, mask)


@triton.jit(do_not_specialize=["key", "first"])
def _descend(
    param: tl.tensor,
    update: tl.tensor,
    skip: tl.tensor,
    step: tl.tensor,
    count: int,
    key: int,
    first: int,
    keep: float,
    rate: float,
    BLOCK: tl.constexpr,
) -> None:
    if tl.load(skip) != 0:
        return
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    value = tl.load(param + offsets, mask=mask, other=0.0).to(tl.float32) * keep
    value = value - tl.load(update + offsets, mask=mask, other=0.0).to(tl.float32) * rate
    word, _ = draw(offsets + first, tl.load(step), key)  # pyright: ignore[reportGeneralTypeIssues]
    _store(param, offsets, value, word, mask)


@triton.jit
def _scale(tensor: tl.tensor, factor: tl.tensor, count: int, BLOCK: tl.constexpr) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    values = tl.load(tensor + offsets, mask=mask, other=0.0).to(tl.float32) * tl.load(factor)
    tl.store(tensor + offsets, values, mask=mask)
