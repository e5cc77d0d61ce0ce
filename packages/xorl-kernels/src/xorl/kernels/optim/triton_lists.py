"""Triton kernels over lists of tensors: one launch for all tensors of the same dtypes, whose addresses are in a table.

Imported only if Triton is installed. A program processes one chunk of one tensor, so small tensors need no separate
launches, and large ones spread over the whole device. `reference.py` has the plain twins, `updates.py` the contracts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from xorl.kernels.fused.device import launch
from xorl.kernels.optim.noise import Noise
from xorl.kernels.optim.triton_updates import draw, index_of, inverse, load, store

BLOCK = 1024
# Large enough that a table row is loaded only once for 16 blocks, small enough that even small models fill the device.
CHUNK = 16 * BLOCK
# Bytes of the widest load; tensors whose addresses are not multiples of this are read element by element.
ALIGNMENT = 16
# Number of columns of the tables: number of elements, first program, and the arguments of the kernel.
_NUM_ADAMW_COLUMNS = tl.constexpr(12)
_NUM_SUM_COLUMNS = tl.constexpr(3)
_ALIGNMENT = tl.constexpr(ALIGNMENT)
# Of elements that follow each other, beside others that do not.
NO_WIDTH = 1 << 62
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class _Table:
    """The arguments of a launch for each tensor.

    Attributes:
        rows: int64 [tensors, columns], on the device.
        row_of_program: int64 [programs], the row that each program processes.
    """

    rows: Tensor
    row_of_program: Tensor

    @classmethod
    def of(cls, counts: Sequence[int], columns: Sequence[Sequence[int]], device: torch.device) -> "_Table":
        """Build the table from the number of elements of each tensor and the remaining columns."""
        chunks = [-(-count // CHUNK) for count in counts]
        first_programs = [0]
        for number in chunks:
            first_programs.append(first_programs[-1] + number)
        rows = [(*row, *rest) for *row, rest in zip(counts, first_programs[:-1], columns, strict=True)]
        # Pinned, because a copy from pageable memory would make the host wait for all queued work.
        table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        row_of_program = torch.repeat_interleave((table[:, 0] + (CHUNK - 1)) // CHUNK, output_size=first_programs[-1])
        return cls(table, row_of_program)


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
    """See `updates.adamw_`."""
    beta1, beta2 = betas
    rates = (lr, lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, eps)
    for variant, members in _by_variant(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)).items():
        columns = [(*addresses, index, *_noise_columns(noises, index)) for index, addresses in members]
        table = _Table.of([params[index].numel() for index, _ in members], columns, params[0].device)
        has_width = noises is not None and any(noises[index].width for index, _ in members)
        flags = {"IS_ALIGNED": variant.is_aligned, "IS_STOCHASTIC": noises is not None, "HAS_WIDTH": has_width}
        names = ("PARAM_DTYPE", "GRAD_DTYPE", "EXP_AVG_DTYPE", "EXP_AVG_SQ_DTYPE")
        dtypes = dict(zip(names, map(_TYPES.get, variant.dtypes), strict=True))
        arguments = (table.rows, table.row_of_program, corrections, grad_scale, skip)
        sizes = {"CHUNK": CHUNK, "BLOCK": BLOCK}
        launch(_adamw, (table.row_of_program.numel(),), *arguments, *rates, num_warps=4, **dtypes, **flags, **sizes)


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """See `updates.square_sum`."""
    sums: list[Tensor] = []
    for variant, members in _by_variant(zip(tensors, strict=True)).items():
        counts = [tensors[index].numel() for index, _ in members]
        table = _Table.of(counts, [addresses for _, addresses in members], tensors[0].device)
        parts = torch.empty(table.row_of_program.shape, dtype=torch.float32, device=tensors[0].device)
        flags = {"DTYPE": _TYPES[variant.dtypes[0]], "IS_ALIGNED": variant.is_aligned}
        sizes = {"CHUNK": CHUNK, "BLOCK": BLOCK}
        launch(_square_sum, (parts.numel(),), table.rows, table.row_of_program, parts, num_warps=4, **flags, **sizes)
        sums.append(parts.sum())
    return torch.stack(sums).sum()


class _KernelVariant(NamedTuple):
    """The properties of tensors that a kernel is specialised for."""

    dtypes: tuple[torch.dtype, ...]
    is_aligned: bool


def _by_variant(groups: Iterable[tuple[Tensor, ...]]) -> dict[_KernelVariant, list[tuple[int, list[int]]]]:
    """(index, addresses) of each group of non-empty tensors, by the kernel variant that it needs."""
    variants: dict[_KernelVariant, list[tuple[int, list[int]]]] = {}
    for index, group in enumerate(groups):
        if not group[0].numel():
            continue
        addresses = [tensor.data_ptr() for tensor in group]
        is_aligned = not any(address % ALIGNMENT for address in addresses)
        variant = _KernelVariant(tuple(tensor.dtype for tensor in group), is_aligned)
        variants.setdefault(variant, []).append((index, addresses))
    return variants


def _noise_columns(noises: Sequence[Noise] | None, index: int) -> tuple[int, ...]:
    if noises is None:
        return (0, 0, 0, 0, 0)
    noise = noises[index]
    return (noise.key, noise.first, noise.step.data_ptr(), noise.width or NO_WIDTH, noise.stride)


@triton.jit
def _pointer(address: tl.tensor, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr) -> tl.tensor:
    """The pointer to DTYPE that is stored at `address`."""
    pointer = tl.load(address).to(tl.pointer_type(DTYPE))  # pyright: ignore[reportArgumentType] a constant dtype
    if IS_ALIGNED:
        pointer = tl.multiple_of(pointer, _ALIGNMENT)
    return pointer


@triton.jit
def _adamw_block(
    param: tl.tensor,
    grad: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    mask: tl.tensor | None,
    index: tl.tensor,
    key: tl.tensor,
    step: tl.tensor,
    step_size: tl.tensor,
    inverse_root: tl.tensor,
    factor: tl.tensor,
    zero: tl.tensor,
    decay: float,
    beta1: float,
    one_minus_beta1: float,
    beta2: float,
    one_minus_beta2: float,
    eps: float,
    IS_STOCHASTIC: tl.constexpr,
) -> None:
    """Update a block. FMAs are explicit: if the compiler chose where to fuse, shards could round differently."""
    gradient = load(grad, mask) * factor
    mean = tl.fma(load(exp_avg, mask), beta1, gradient * one_minus_beta1)
    square = tl.fma(load(exp_avg_sq, mask), beta2, gradient * gradient * one_minus_beta2)
    ratio = mean / tl.fma(tl.sqrt(square), inverse_root, eps)
    # Subtracts decay * old, since a factor of 1 - decay would be rounded to a multiple of 2**-24.
    old = load(param, mask)
    value = old - tl.fma(old, decay, ratio * step_size)
    if IS_STOCHASTIC:
        # Adds 0, but makes the compiler give the indices the register layout of the loads. Otherwise it would convert
        # the drawn words through shared memory, which also takes more registers.
        index = index + (gradient.to(tl.int32, bitcast=True) & zero)
        word, other = draw(index, step, key)  # pyright: ignore[reportGeneralTypeIssues]
        store(param, value, mask, word)
        store(exp_avg, mean, mask, word >> 16)
        store(exp_avg_sq, square, mask, other)
    else:
        store(param, value, mask, None)
        store(exp_avg, mean, mask, None)
        store(exp_avg_sq, square, mask, None)


@triton.jit
def _adamw(
    table: tl.tensor,
    row_of_program: tl.tensor,
    corrections: tl.tensor,
    grad_scale: tl.tensor | None,
    skip: tl.tensor,
    lr: float,
    decay: float,
    beta1: float,
    one_minus_beta1: float,
    beta2: float,
    one_minus_beta2: float,
    eps: float,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    EXP_AVG_DTYPE: tl.constexpr,
    EXP_AVG_SQ_DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr,
    HAS_WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Table columns: number of elements, first program, addresses of the four tensors, row of corrections, key, first,
    address of step, width, stride.
    """
    if tl.load(skip) != 0:
        return
    row = table + tl.load(row_of_program + tl.program_id(0)) * _NUM_ADAMW_COLUMNS
    count = tl.load(row)
    start = (tl.program_id(0) - tl.load(row + 1)) * CHUNK
    param = _pointer(row + 2, PARAM_DTYPE, IS_ALIGNED) + start
    grad = _pointer(row + 3, GRAD_DTYPE, IS_ALIGNED) + start
    exp_avg = _pointer(row + 4, EXP_AVG_DTYPE, IS_ALIGNED) + start
    exp_avg_sq = _pointer(row + 5, EXP_AVG_SQ_DTYPE, IS_ALIGNED) + start
    correction = corrections + tl.load(row + 6) * 2
    step_size = lr / tl.load(correction)
    inverse_root = 1.0 / tl.sqrt(tl.load(correction + 1))
    factor = inverse(grad_scale)
    key, first, step, width, stride = 0, 0, 0, 0, 0
    if IS_STOCHASTIC:
        key = tl.load(row + 7)
        first = tl.load(row + 8)
        width = tl.load(row + 10)
        stride = tl.load(row + 11)
        step = tl.load(tl.load(row + 9).to(tl.pointer_type(tl.int64)))
    zero = tl.load(skip).to(tl.int32)  # always 0, as checked above, but unknown to the compiler
    lanes = tl.arange(0, BLOCK)
    # Full chunks use no mask. With one, loads would not be vectorised, since the divisibility of `count` is unknown.
    if start + CHUNK <= count:
        for begin in range(0, CHUNK, BLOCK):
            at = begin + lanes
            index = index_of(start + at, first, width, stride, HAS_WIDTH)
            _adamw_block(
                param + at, grad + at, exp_avg + at, exp_avg_sq + at, None, index, key, step, step_size,
                inverse_root, factor, zero, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, IS_STOCHASTIC,
            )  # fmt: skip
    else:
        for begin in range(0, CHUNK, BLOCK):
            at = begin + lanes
            index = index_of(start + at, first, width, stride, HAS_WIDTH)
            _adamw_block(
                param + at, grad + at, exp_avg + at, exp_avg_sq + at, start + at < count, index, key, step,
                step_size, inverse_root, factor, zero, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, eps,
                IS_STOCHASTIC,
            )  # fmt: skip


@triton.jit
def _square_sum(
    table: tl.tensor,
    row_of_program: tl.tensor,
    parts: tl.tensor,
    DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program writes the fp32 sum of its chunk. Table columns: number of elements, first program, address."""
    row = table + tl.load(row_of_program + tl.program_id(0)) * _NUM_SUM_COLUMNS
    count = tl.load(row)
    start = (tl.program_id(0) - tl.load(row + 1)) * CHUNK
    pointer = _pointer(row + 2, DTYPE, IS_ALIGNED) + start
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    if start + CHUNK <= count:
        for begin in range(0, CHUNK, BLOCK):
            values = load(pointer + begin + lanes, None)
            total += values * values
    else:
        for begin in range(0, CHUNK, BLOCK):
            at = begin + lanes
            values = load(pointer + at, start + at < count)
            total += values * values
    tl.store(parts + tl.program_id(0), tl.sum(total))
