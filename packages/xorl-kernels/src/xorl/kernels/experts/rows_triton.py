"""Computations of a layer of experts between its products, one kernel each. Plain twins: the functions of `rows`.

Shapes: T tokens, K experts per token, M rows (T * K, or fewer), D model width, F width of an expert, E experts.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from xorl.kernels.experts import rows as plain
from xorl.kernels.experts.gates import Gate
from xorl.kernels.fused.device import launch, power_of_2

# Values of a row that a program holds at once.
MAX_BLOCK = 2048
NUM_WARPS = 4


def gated(up: Tensor, ends: Tensor, gate: Gate, biases: Tensor | None) -> Tensor:
    """As `rows.gated`."""
    up = up.contiguous()
    if gate.squares:
        return plain.gated(up, ends, gate, biases)
    num_rows, width = up.shape[0], up.shape[1] // 2
    out = up.new_empty(num_rows, width)
    if num_rows:
        block = min(power_of_2(width), MAX_BLOCK)
        grid = (num_rows, math.ceil(width / block))
        ends, given = _read_ends(ends, biases), biases_or(biases, up)
        constants = gate_constants(gate, biases, len(ends))
        launch(_gated, grid, up, given, ends, out, WIDTH=width, BLOCK=block, num_warps=NUM_WARPS, **constants)
    return out


def _read_ends(ends: Tensor, biases: Tensor | None) -> Tensor:
    """The ends that a kernel reads: only the last one unless it has to find the expert of a row."""
    return ends[-1:] if biases is None else ends


def gate_constants(gate: Gate, biases: Tensor | None, num_experts: int) -> dict[str, object]:
    """The constants of kernels that call `activated`."""
    has_limit = gate.limit < math.inf
    return {
        "NUM_EXPERTS": num_experts,
        "BLOCK_EXPERTS": power_of_2(num_experts),
        "HAS_BIASES": biases is not None,
        "ALPHA": gate.alpha,
        "CUBIC": gate.cubic,
        "HAS_LIMIT": has_limit,
        "LIMIT": gate.limit if has_limit else 0.0,
        "OFFSET": gate.offset,
    }


def biases_or(biases: Tensor | None, other: Tensor) -> Tensor:
    """The biases for a kernel, or some tensor that it does not read."""
    return other if biases is None else biases.contiguous()


def gated_backward(
    grad: Tensor,
    up: Tensor,
    weights: Tensor,
    choices: Tensor,
    ends: Tensor,
    grad_weights: Tensor,
    gate: Gate,
    biases: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `rows.gated_backward`; overwrites `grad`, contiguous, with the second result."""
    if gate.squares:
        return plain.gated_backward(grad, up, weights, choices, ends, grad_weights, gate, biases)
    assert grad.is_contiguous(), "the kernel overwrites it row by row"
    assert grad_weights.is_contiguous(), "the kernel writes to the choices in it"
    up, weights = up.contiguous(), weights.contiguous()
    grad_up = torch.empty_like(up)
    num_rows, width = grad.shape
    ends = _read_ends(ends, biases)
    if num_rows:
        launch(
            _gated_backward,
            (num_rows,),
            grad,
            up,
            biases_or(biases, up),
            weights,
            choices,
            ends,
            grad_up,
            grad_weights,
            WIDTH=width,
            BLOCK=min(power_of_2(width), MAX_BLOCK),
            num_warps=NUM_WARPS,
            **gate_constants(gate, biases, len(ends)),
        )
    return grad_up, grad


def combine(y: Tensor, weights: Tensor | None, rows: Tensor, ends: Tensor, out: Tensor | None = None) -> Tensor:
    """As `rows.combine`."""
    y = y.contiguous()
    (num_tokens, num_choices), width = rows.shape, y.shape[1]
    adds = out is not None
    out = y.new_empty(num_tokens, width) if out is None else out
    if out.numel():
        block = min(power_of_2(width), MAX_BLOCK)
        launch(
            _combine,
            (num_tokens, math.ceil(width / block)),
            y,
            rows if weights is None else weights.contiguous(),
            rows,
            ends[-1:],
            out,
            WIDTH=width,
            NUM_CHOICES=num_choices,
            HAS_WEIGHTS=weights is not None,
            ADDS=adds,
            BLOCK=block,
            num_warps=NUM_WARPS,
        )
    return out


def sum_parts(parts: Tensor) -> Tensor:
    """As `rows.sum_parts`."""
    parts = parts.contiguous()
    out = parts.new_empty(parts.shape[1:])
    if count := out.numel():
        grid = (math.ceil(count / MAX_BLOCK),)
        launch(_sum_parts, grid, parts, out, count, NUM_PARTS=len(parts), BLOCK=MAX_BLOCK, num_warps=NUM_WARPS)
    return out


@triton.jit
def activated(
    gate: tl.tensor,
    up: tl.tensor,
    ALPHA: tl.constexpr,
    CUBIC: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """g, its sigmoid, and u + offset, of which the product is the activation: see `gates.Gate`. In fp32."""
    if HAS_LIMIT:  # NaN stays NaN, as it would not with a minimum
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    exponent = gate
    if ALPHA != 1.0:
        exponent = gate * ALPHA
    if CUBIC != 0.0:
        exponent += gate * gate * gate * CUBIC
    if OFFSET != 0.0:
        up += OFFSET
    return gate, tl.sigmoid(exponent), up


@triton.jit
def _expert_of(
    ends_ptr: tl.tensor, row: tl.tensor, NUM_EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr
) -> tl.tensor:
    """The expert of a row, int64."""
    experts = tl.arange(0, BLOCK_EXPERTS)
    ends = tl.load(ends_ptr + experts, mask=experts < NUM_EXPERTS, other=2**31 - 1)
    return tl.sum((ends <= row).to(tl.int64), axis=0)


@triton.jit
def _halves_of(
    up_ptr: tl.tensor,
    biases_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    row: tl.tensor,
    columns: tl.tensor,
    is_inside: tl.tensor,
    WIDTH: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    HAS_BIASES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Some columns of both halves of a row, with the biases of its expert, in fp32."""
    gate = tl.load(up_ptr + row * 2 * WIDTH + columns, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * 2 * WIDTH + WIDTH + columns, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_BIASES:
        bias_ptr = biases_ptr + _expert_of(ends_ptr, row, NUM_EXPERTS, BLOCK_EXPERTS) * 2 * WIDTH
        gate += tl.load(bias_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + WIDTH + columns, mask=is_inside, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def _gated(
    up_ptr: tl.tensor,
    biases_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    out_ptr: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    HAS_BIASES: tl.constexpr,
    ALPHA: tl.constexpr,
    CUBIC: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < WIDTH
    if row < tl.load(ends_ptr + NUM_EXPERTS - 1):
        halves = _halves_of(
            up_ptr, biases_ptr, ends_ptr, row, columns, is_inside, WIDTH, NUM_EXPERTS, BLOCK_EXPERTS, HAS_BIASES
        )
        parts = activated(halves[0], halves[1], ALPHA, CUBIC, HAS_LIMIT, LIMIT, OFFSET)
        out = parts[0] * parts[1] * parts[2]
        dtype = out_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue] it is a pointer
        tl.store(out_ptr + row * WIDTH + columns, out.to(dtype), mask=is_inside)


@triton.jit
def _sum_parts(
    parts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    count: tl.int64,  # pyright: ignore[reportInvalidTypeForm]  (Triton's way to pass a wide integer)
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = offsets < count
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        total += tl.load(parts_ptr + part * count + offsets, mask=is_inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue] it is a pointer
    tl.store(out_ptr + offsets, total.to(dtype), mask=is_inside)


@triton.jit
def _gated_backward(
    grad_ptr: tl.tensor,
    up_ptr: tl.tensor,
    biases_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    choices_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    grad_up_ptr: tl.tensor,
    grad_weights_ptr: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    HAS_BIASES: tl.constexpr,
    ALPHA: tl.constexpr,
    CUBIC: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    choice = tl.load(choices_ptr + row).to(tl.int64)
    grad_weight = 0.0
    if row < tl.load(ends_ptr + NUM_EXPERTS - 1):
        weight = tl.load(weights_ptr + choice)
        products = tl.zeros([BLOCK], tl.float32)
        for start in tl.static_range(0, WIDTH, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            is_inside = columns < WIDTH
            grad = tl.load(grad_ptr + row * WIDTH + columns, mask=is_inside, other=0.0).to(tl.float32)
            halves = _halves_of(
                up_ptr, biases_ptr, ends_ptr, row, columns, is_inside, WIDTH, NUM_EXPERTS, BLOCK_EXPERTS, HAS_BIASES
            )
            whole_gate, whole_up = halves[0], halves[1]
            parts = activated(whole_gate, whole_up, ALPHA, CUBIC, HAS_LIMIT, LIMIT, OFFSET)
            gate, sigmoid, up = parts[0], parts[1], parts[2]
            output = gate * sigmoid * up
            products += grad * output
            grad *= weight
            rest = gate * (1.0 - sigmoid)
            if CUBIC != 0.0:
                rest *= ALPHA + 3.0 * CUBIC * gate * gate
            elif ALPHA != 1.0:
                rest *= ALPHA
            grad_gate = grad * up * sigmoid * (1.0 + rest)
            grad_value = grad * gate * sigmoid
            if HAS_LIMIT:
                grad_gate = tl.where(whole_gate <= LIMIT, grad_gate, 0.0)
                grad_value = tl.where(tl.abs(whole_up) <= LIMIT, grad_value, 0.0)
            dtype = grad_up_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue] it is a pointer
            tl.store(grad_up_ptr + row * 2 * WIDTH + columns, grad_gate.to(dtype), mask=is_inside)
            tl.store(grad_up_ptr + row * 2 * WIDTH + WIDTH + columns, grad_value.to(dtype), mask=is_inside)
            tl.store(grad_ptr + row * WIDTH + columns, (output * weight).to(dtype), mask=is_inside)
        grad_weight = tl.sum(products, axis=0)
    tl.store(grad_weights_ptr + choice, grad_weight)


@triton.jit
def _combine(
    y_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    end_ptr: tl.tensor,
    out_ptr: tl.tensor,
    WIDTH: tl.constexpr,
    NUM_CHOICES: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < WIDTH
    end = tl.load(end_ptr)
    total = tl.zeros([BLOCK], tl.float32)
    num_found = 0
    for choice in tl.static_range(NUM_CHOICES):
        row = tl.load(rows_ptr + token * NUM_CHOICES + choice)
        is_found = (row >= 0) & (row < end)
        num_found += is_found.to(tl.int32)
        has_row = is_inside & is_found
        part = tl.load(y_ptr + row.to(tl.int64) * WIDTH + columns, mask=has_row, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            part *= tl.load(weights_ptr + token * NUM_CHOICES + choice)
        total += part
    dtype = out_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue] it is a pointer
    if ADDS:
        is_inside = is_inside & (num_found > 0)
        total += tl.load(out_ptr + token * WIDTH + columns, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + columns, total.to(dtype), mask=is_inside)
