"""Cross-entropy of rows of logits together with its gradient, and two helpers of `linear_ce`, as Triton kernels.

Shapes: B rows, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from xorl.kernels.fused.device import launch, power_of_2, rows_per_program
from xorl.kernels.fused.reference import IGNORE, PartLosses, RowLosses

# Values per block of a row. Each thread loads NEIGHBOURS adjacent values at once and computes their maximum and sum
# without communicating with other threads.
BLOCK = 8192
NEIGHBOURS = 8
NUM_WARPS = 16
# Rows and columns that a program of `add_at_labels_` reads at once.
ADDED_ROWS = 16
ADDED_COLUMNS = 512
SCALE_BLOCK = 4096
SCALE_WARPS = 8
LOWEST = tl.constexpr(-3.0e38)
# The single-read path computes exp(logit - maximum of the row's first block). It is used only if the row's maximum
# exceeds that of the first block by at most this, so that the sum and its reciprocal stay well within fp32's range.
MAX_EXPONENT = tl.constexpr(40.0)


def cross_entropy_rows(
    logits: Tensor,
    labels: Tensor,
    token_weight: Tensor | None,
    gradient: Tensor | None,
    results: RowLosses,
    softcap: float | None = None,
) -> None:
    """The kernel behind `reference.cross_entropy_rows`, for fp32, bf16 and fp16 logits whose rows are contiguous.

    A label outside the vocabulary gives a loss and a scale of NaN.

    Each program processes one row. If the gradient goes to a separate buffer whose dtype has the range of fp32, the row
    is read once: one loop sums the exponentials, relative to the maximum of the first block, and writes them as the
    gradient. Otherwise, or if the row's maximum is far above that of the first block, the row is read twice: once for
    the running log-sum-exp and once for the gradient, which may overwrite the row if the dtypes are equal.
    """
    weights = labels if token_weight is None else token_weight.contiguous()
    flags = {"HAS_WEIGHT": token_weight is not None, "CAP": softcap or 0.0}
    _launch_by_row(_cross_entropy_rows, logits, labels, (weights, *results), gradient, flags)


def cross_entropy_part(
    logits: Tensor, labels: Tensor, gradient: Tensor | None, part: PartLosses, softcap: float | None = None
) -> None:
    """The kernel behind `reference.cross_entropy_part`, which reads each row as that of `cross_entropy_rows` does."""
    _launch_by_row(_cross_entropy_part, logits, labels, part, gradient, {"CAP": softcap or 0.0})


def _launch_by_row(
    kernel: object,
    logits: Tensor,
    labels: Tensor,
    others: Sequence[Tensor],
    gradient: Tensor | None,
    flags: Mapping[str, bool | float],
) -> None:
    """Launch a program of `kernel` for each row of `logits`, whose rows are read by `_sum_row`."""
    assert logits.stride(1) == 1
    assert gradient is None or gradient.stride(1) == 1
    assert labels.is_contiguous()
    is_in_place = gradient is not None and gradient.data_ptr() == logits.data_ptr()
    num_rows, num_columns = logits.shape
    if num_rows:
        block = min(BLOCK, power_of_2(num_columns))
        launch(
            kernel,
            (num_rows,),
            logits,
            labels,
            *others,
            logits if gradient is None else gradient,
            logits.stride(0),
            logits.stride(0) if gradient is None else gradient.stride(0),
            NUM_COLUMNS=num_columns,
            IGNORED=IGNORE,
            **flags,
            WRITES_GRADIENT=gradient is not None,
            READS_ONCE=gradient is not None and gradient.dtype != torch.float16 and not is_in_place,
            BLOCK=block,
            NEIGHBOURS=min(NEIGHBOURS, block),
            num_warps=NUM_WARPS,
        )


def scale_(x: Tensor, factor: Tensor) -> None:
    """Multiply contiguous `x` by the scalar tensor `factor` in place; does not access x if the factor is 1."""
    assert x.is_contiguous()
    if x.numel():
        # Few programs, because all of them are launched even if the factor is 1 and there is nothing to do.
        blocks = rows_per_program(math.ceil(x.numel() / SCALE_BLOCK), 2)
        grid = (math.ceil(x.numel() / SCALE_BLOCK / blocks),)
        launch(_scale, grid, x, factor, x.numel(), BLOCKS=blocks, BLOCK=SCALE_BLOCK, num_warps=SCALE_WARPS)


def add_at_labels_(target: Tensor, rows: Tensor, labels: Tensor, factors: Tensor) -> None:
    """The kernel behind `reference.add_at_labels_`. Sorts the labels; one program then sums the rows of each label."""
    num_rows, width = rows.shape
    if num_rows == 0:
        return
    assert rows.is_contiguous()
    assert target.is_contiguous()
    sorted_labels, order = labels.sort(stable=True)
    block = min(ADDED_COLUMNS, power_of_2(width))
    launch(
        _add_at_labels,
        (num_rows, math.ceil(width / block)),
        target,
        rows,
        sorted_labels,
        order,
        factors,
        num_rows,
        len(target),
        WIDTH=width,
        ROWS=ADDED_ROWS,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit
def _cross_entropy_rows(
    logits_ptr: tl.tensor,
    labels_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    losses_ptr: tl.tensor,
    correct_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    label_errors_ptr: tl.tensor,
    gradient_ptr: tl.tensor,
    logits_stride: int,
    gradient_stride: int,
    NUM_COLUMNS: tl.constexpr,
    IGNORED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CAP: tl.constexpr,
    WRITES_GRADIENT: tl.constexpr,
    READS_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
) -> None:
    gradient_type = gradient_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue] it is a pointer
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    gradient_ptr += row * gradient_stride
    label = tl.load(labels_ptr + row)
    if label == IGNORED:
        tl.store(losses_ptr + row, 0.0)
        tl.store(correct_ptr + row, False)
        tl.store(scales_ptr + row, 0.0)
        tl.store(label_errors_ptr + row, 0.0)
        if WRITES_GRADIENT:
            _clear_row(gradient_ptr, NUM_COLUMNS, BLOCK, NEIGHBOURS)
    else:
        is_in_vocab = (label >= 0) & (label < NUM_COLUMNS)
        column = tl.where(is_in_vocab, label, 0).to(tl.int32)  # int64 would widen the values it is compared with
        target = tl.load(logits_ptr + column, mask=is_in_vocab, other=float("nan")).to(tl.float32)
        if CAP > 0.0:
            target = _capped(target, CAP)
        # The gradient is stored as exp(logit - shift), and at the label minus the row's total; `scale` divides by it.
        shift, total, maximum, max_before = _sum_row(  # pyright: ignore[reportGeneralTypeIssues] it is compiled
            logits_ptr, gradient_ptr, column, NUM_COLUMNS, CAP, WRITES_GRADIENT, READS_ONCE, BLOCK, NEIGHBOURS
        )
        tl.store(losses_ptr + row, shift + tl.log(total) - target)
        tl.store(correct_ptr + row, (target >= maximum) & (target > max_before))
        if WRITES_GRADIENT:
            tl.debug_barrier()  # another thread may have written the label's element
            exact = _times_slope(tl.exp(target - shift) - total, target, CAP)
            rounded = exact.to(gradient_type)
            tl.store(gradient_ptr + column, rounded, mask=is_in_vocab)
            weight = tl.where(is_in_vocab, 1.0, float("nan"))
            if HAS_WEIGHT:
                weight *= tl.load(weights_ptr + row).to(tl.float32)
            scale = weight / total
            tl.store(scales_ptr + row, scale)
            error = (exact - rounded.to(tl.float32)) * scale
            tl.store(label_errors_ptr + row, tl.where(is_in_vocab, error, 0.0))


@triton.jit
def _cross_entropy_part(
    logits_ptr: tl.tensor,
    labels_ptr: tl.tensor,
    shifts_ptr: tl.tensor,
    rounded_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    before_ptr: tl.tensor,
    gradient_ptr: tl.tensor,
    logits_stride: int,
    gradient_stride: int,
    NUM_COLUMNS: tl.constexpr,
    IGNORED: tl.constexpr,
    CAP: tl.constexpr,
    WRITES_GRADIENT: tl.constexpr,
    READS_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
) -> None:
    gradient_type = gradient_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue] it is a pointer
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    gradient_ptr += row * gradient_stride
    label = tl.load(labels_ptr + row)
    if label == IGNORED:
        if WRITES_GRADIENT:
            _clear_row(gradient_ptr, NUM_COLUMNS, BLOCK, NEIGHBOURS)
    else:
        is_held = (label >= 0) & (label < NUM_COLUMNS)
        column = tl.where(is_held, label, 0).to(tl.int32)
        target = tl.load(logits_ptr + column, mask=is_held, other=float("-inf")).to(tl.float32)
        if CAP > 0.0:
            target = tl.where(is_held, _capped(target, CAP), float("-inf"))
        shift, total, maximum, max_before = _sum_row(  # pyright: ignore[reportGeneralTypeIssues] it is compiled
            logits_ptr, gradient_ptr, column, NUM_COLUMNS, CAP, WRITES_GRADIENT, READS_ONCE, BLOCK, NEIGHBOURS
        )
        tl.store(shifts_ptr + row, shift)
        tl.store(log_sums_ptr + row, shift + tl.log(total))
        tl.store(targets_ptr + row, target)
        tl.store(largest_ptr + row, maximum)
        tl.store(before_ptr + row, tl.where(is_held, max_before, float("-inf")))
        stored = _times_slope(tl.exp(target - shift), target, CAP)
        if CAP > 0.0:
            stored = tl.where(is_held, stored, 0.0)
        tl.store(rounded_ptr + row, stored.to(gradient_type).to(tl.float32))


@triton.jit
def _clear_row(
    gradient_ptr: tl.tensor, NUM_COLUMNS: tl.constexpr, BLOCK: tl.constexpr, NEIGHBOURS: tl.constexpr
) -> None:
    LANES: tl.constexpr = BLOCK // NEIGHBOURS
    block = tl.arange(0, LANES)[:, None] * NEIGHBOURS + tl.arange(0, NEIGHBOURS)[None, :]
    gradient_type = gradient_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue] it is a pointer
    for start in range(0, NUM_COLUMNS, BLOCK):
        columns = start + block
        zeros = tl.zeros([LANES, NEIGHBOURS], tl.float32).to(gradient_type)
        tl.store(gradient_ptr + columns, zeros, mask=columns < NUM_COLUMNS)


@triton.jit
def _sum_row(
    logits_ptr: tl.tensor,
    gradient_ptr: tl.tensor,
    column: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    CAP: tl.constexpr,
    WRITES_GRADIENT: tl.constexpr,
    READS_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(shift, sum of exp(logit - shift), largest logit, largest before `column`), of capped logits.

    Writes exp(logit - shift), times the derivative of the cap.
    """
    gradient_type = gradient_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue] it is a pointer
    LANES: tl.constexpr = BLOCK // NEIGHBOURS
    block = tl.arange(0, LANES)[:, None] * NEIGHBOURS + tl.arange(0, NEIGHBOURS)[None, :]  # [lanes, neighbours]
    shift, total = tl.full([], 0.0, tl.float32), tl.full([], 1.0, tl.float32)
    maximum, max_before, is_written = shift, shift, False
    if READS_ONCE:
        x = _logits(logits_ptr, block, NUM_COLUMNS, CAP)
        shift = tl.maximum(tl.max(tl.max(x, axis=1), axis=0), LOWEST)
        maxima = tl.full([LANES], LOWEST, tl.float32)
        sums = tl.zeros([LANES], tl.float32)
        maxima_before = tl.full([LANES], float("-inf"), tl.float32)
        for start in range(0, NUM_COLUMNS, BLOCK):
            columns = start + block
            is_inside = columns < NUM_COLUMNS
            x = _logits(logits_ptr, columns, NUM_COLUMNS, CAP)
            exponentials = tl.exp(x - shift)
            stored = _times_slope(exponentials, x, CAP)
            tl.store(gradient_ptr + columns, stored.to(gradient_type), mask=is_inside)
            sums += tl.sum(exponentials, axis=1)
            maxima = tl.maximum(maxima, tl.max(x, axis=1))
            maxima_before = tl.maximum(maxima_before, tl.max(tl.where(columns < column, x, float("-inf")), axis=1))
        maximum, max_before = tl.max(maxima, axis=0), tl.max(maxima_before, axis=0)
        total = tl.sum(sums, axis=0)
        is_written = maximum - shift <= MAX_EXPONENT
    if not is_written:
        # Starts at a finite value, so that the sum of a lane with only -inf is 0 rather than NaN.
        maxima = tl.full([LANES], LOWEST, tl.float32)
        sums = tl.zeros([LANES], tl.float32)
        maxima_before = tl.full([LANES], float("-inf"), tl.float32)
        for start in range(0, NUM_COLUMNS, BLOCK):
            columns = start + block
            x = _logits(logits_ptr, columns, NUM_COLUMNS, CAP)
            new_maxima = tl.maximum(maxima, tl.max(x, axis=1))
            sums = sums * tl.exp(maxima - new_maxima) + tl.sum(tl.exp(x - new_maxima[:, None]), axis=1)
            maxima = new_maxima
            maxima_before = tl.maximum(maxima_before, tl.max(tl.where(columns < column, x, float("-inf")), axis=1))
        maximum, max_before = tl.max(maxima, axis=0), tl.max(maxima_before, axis=0)
        shift = maximum + tl.log(tl.sum(sums * tl.exp(maxima - maximum), axis=0))
        total = tl.full([], 1.0, tl.float32)
        if WRITES_GRADIENT:
            for start in range(0, NUM_COLUMNS, BLOCK):
                columns = start + block
                is_inside = columns < NUM_COLUMNS
                x = _logits(logits_ptr, columns, NUM_COLUMNS, CAP)
                stored = _times_slope(tl.exp(x - shift), x, CAP)
                tl.store(gradient_ptr + columns, stored.to(gradient_type), mask=is_inside)
    return shift, total, maximum, max_before


@triton.jit
def _logits(logits_ptr: tl.tensor, columns: tl.tensor, NUM_COLUMNS: tl.constexpr, CAP: tl.constexpr) -> tl.tensor:
    """The logits of some columns of a row, capped; -inf beyond its end."""
    is_inside = columns < NUM_COLUMNS
    x = tl.load(logits_ptr + columns, mask=is_inside, other=float("-inf")).to(tl.float32)
    if CAP > 0.0:
        x = tl.where(is_inside, _capped(x, CAP), float("-inf"))
    return x


@triton.jit
def _capped(x: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """CAP * tanh(x / CAP); for large x, the exponential is infinite and the result is CAP."""
    return CAP - 2 * CAP / (tl.exp(x * (2 / CAP)) + 1)


@triton.jit
def _times_slope(values: tl.tensor, capped: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """Values times the derivative of the cap at each capped logit."""
    if CAP > 0.0:
        ratio = capped * (1 / CAP)
        values *= 1 - ratio * ratio
    return values


@triton.jit(do_not_specialize=["num_rows"])
def _add_at_labels(
    target_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    sorted_labels_ptr: tl.tensor,
    order_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    num_rows: int,
    num_labels: int,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The program at the first row of a label adds up all rows of that label; other programs return at once."""
    first = tl.program_id(0)
    label = tl.load(sorted_labels_ptr + first)
    is_first = first == 0
    if first > 0:
        is_first = tl.load(sorted_labels_ptr + first - 1) != label
    if is_first & (label >= 0) & (label < num_labels):
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        is_column = columns < WIDTH
        total = tl.zeros([BLOCK], tl.float32)
        start = first
        has_more = True
        while has_more:
            positions = start + tl.arange(0, ROWS)
            is_row = positions < num_rows
            has_label = is_row & (tl.load(sorted_labels_ptr + positions, mask=is_row, other=-1) == label)
            row = tl.load(order_ptr + positions, mask=has_label, other=0)
            factor = tl.load(factors_ptr + row, mask=has_label, other=0.0)
            is_read = has_label[:, None] & is_column[None, :]
            x = tl.load(rows_ptr + row[:, None] * WIDTH + columns[None, :], mask=is_read, other=0.0).to(tl.float32)
            total += tl.sum(x * factor[:, None], axis=0)
            start += ROWS
            has_more = tl.sum(has_label.to(tl.int32), axis=0) == ROWS
        pointers = target_ptr + label * WIDTH + columns
        old = tl.load(pointers, mask=is_column).to(tl.float32)
        dtype = target_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue] it is a pointer
        tl.store(pointers, (old + total).to(dtype), mask=is_column)


@triton.jit
def _scale(
    x_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    num_values: tl.int64,  # pyright: ignore[reportInvalidTypeForm]  (Triton's way to pass a wide integer)
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        for index in range(BLOCKS):
            block = tl.program_id(0).to(tl.int64) * BLOCKS + index
            offsets = block * BLOCK + tl.arange(0, BLOCK)
            is_inside = offsets < num_values
            x = tl.load(x_ptr + offsets, mask=is_inside)
            tl.store(x_ptr + offsets, (x.to(tl.float32) * factor).to(x.dtype), mask=is_inside)
