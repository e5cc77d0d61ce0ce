"""Triton kernels that update one tensor: they read and write it once, and draw random bits in registers.

Imported only if Triton is installed. `reference.py` has the plain twins, `updates.py` the contracts. Kernel arguments
are annotated as `tl.int64` because Triton passes an `int` in 32 bits.
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
    count = buffer.numel()
    tensors = (buffer, grad, buffer if update is None else update, grad_scale, skip, noise.step)
    rates = (momentum, 1 - momentum)
    flags = {"NESTEROV": nesterov, "WRITES_UPDATE": update is not None, "HAS_WIDTH": noise.width > 0}
    numbers = (count, noise.key, noise.first, noise.width, noise.stride)
    launch(_momentum, _grid(count), *tensors, *numbers, *rates, num_warps=4, **flags, BLOCK=BLOCK)


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
    count = param.numel()
    step = None if noise is None else noise.step
    numbers = (0, 0, 0, 0) if noise is None else (noise.key, noise.first, noise.width, noise.stride)
    arguments = (param, update, grad_scale, skip, step, count, *numbers, decay, rate)
    has_width = noise is not None and noise.width > 0
    launch(_descend, _grid(count), *arguments, num_warps=4, HAS_WIDTH=has_width, BLOCK=BLOCK)


def scale_(tensor: Tensor, factor: Tensor) -> None:
    """See `updates.scale_`."""
    launch(_scale, _grid(tensor.numel()), tensor, factor, tensor.numel(), num_warps=4, BLOCK=BLOCK)


def _grid(count: int) -> tuple[int]:
    return (-(-count // BLOCK),)


@triton.jit
def draw(index: tl.tensor, step: tl.tensor, key: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The two words of `noise.draw` for int64 indices; also used for noise on dequantised weights."""
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
def index_of(
    element: tl.tensor, first: tl.tensor, width: tl.tensor, stride: tl.tensor, HAS_WIDTH: tl.constexpr
) -> tl.tensor:
    """`Noise.index_of` for int64 elements. Without a width, there is no division, which takes many registers."""
    index = first + element
    if HAS_WIDTH:
        index = first + element // width * stride + element % width
    return index


@triton.jit
def load(pointers: tl.tensor, mask: tl.tensor | None) -> tl.tensor:
    """Load values as fp32, zero where masked out."""
    values = tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0.0)
    return values.to(tl.float32)


@triton.jit
def store(pointers: tl.tensor, values: tl.tensor, mask: tl.tensor | None, word: tl.tensor | None) -> None:
    """Store fp32 values. Rounding to bf16 uses the lower 16 bits of `word`, or is to nearest if it is None."""
    if word is not None and pointers.dtype.element_ty == tl.bfloat16:  # pyright: ignore[reportAttributeAccessIssue]
        raw = values.to(tl.uint32, bitcast=True)
        raw = tl.where(values == values, raw + (word & 0xFFFF), raw)
        tl.store(pointers, (raw >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def inverse(grad_scale: tl.tensor | None) -> tl.tensor | float:
    """The factor by which gradients are multiplied."""
    factor = 1.0
    if grad_scale is not None:
        factor = 1.0 / tl.load(grad_scale)
    return factor


@triton.jit(do_not_specialize=["key", "first", "width", "stride"])
def _momentum(
    buffer: tl.tensor,
    grad: tl.tensor,
    update: tl.tensor,
    grad_scale: tl.tensor | None,
    skip: tl.tensor,
    step: tl.tensor,
    count: tl.int64,  # pyright: ignore[reportInvalidTypeForm]
    key: tl.int64,  # pyright: ignore[reportInvalidTypeForm]
    first: tl.int64,  # pyright: ignore[reportInvalidTypeForm]
    width: tl.int64,  # pyright: ignore[reportInvalidTypeForm]
    stride: tl.int64,  # pyright: ignore[reportInvalidTypeForm]
    momentum: float,
    one_minus_momentum: float,
    NESTEROV: tl.constexpr,
    WRITES_UPDATE: tl.constexpr,
    HAS_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    if tl.load(skip) != 0:
        return
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    gradient = load(grad + offsets, mask) * inverse(grad_scale) * one_minus_momentum
    mean = tl.fma(load(buffer + offsets, mask), momentum, gradient)
    if WRITES_UPDATE:
        direction = tl.fma(mean, momentum, gradient) if NESTEROV else mean
        tl.store(update + offsets, direction, mask=mask)
    word, _ = draw(index_of(offsets, first, width, stride, HAS_WIDTH), tl.load(step), key)  # pyright: ignore[reportGeneralTypeIssues]
    store(buffer + offsets, mean, mask, word >> 16)


@triton.jit(do_not_specialize=["key", "first", "width", "stride"])
def _descend(
    param: tl.tensor,
    update: tl.tensor,
    grad_scale: tl.tensor | None,
    skip: tl.tensor,
    step: tl.tensor | None,
    count: tl.int64,  # pyright: ignore[reportInvalidTypeForm]
    key: tl.int64,  # pyright: ignore[reportInvalidTypeForm]
    first: tl.int64,  # pyright: ignore[reportInvalidTypeForm]
    width: tl.int64,  # pyright: ignore[reportInvalidTypeForm]
    stride: tl.int64,  # pyright: ignore[reportInvalidTypeForm]
    decay: float,
    rate: float,
    HAS_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    if tl.load(skip) != 0:
        return
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    descent = load(update + offsets, mask) * (inverse(grad_scale) * rate)
    old = load(param + offsets, mask)
    change = tl.fma(old, decay, descent)
    if step is None:
        store(param + offsets, old - change, mask, None)
    else:
        word, _ = draw(index_of(offsets, first, width, stride, HAS_WIDTH), tl.load(step), key)  # pyright: ignore[reportGeneralTypeIssues]
        store(param + offsets, old - change, mask, word)


@triton.jit
def _scale(
    tensor: tl.tensor,
    factor: tl.tensor,
    count: tl.int64,  # pyright: ignore[reportInvalidTypeForm]
    BLOCK: tl.constexpr,
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    values = tl.load(tensor + offsets, mask=mask, other=0.0).to(tl.float32) * tl.load(factor)
    tl.store(tensor + offsets, values, mask=mask)
