"""Compiles every Triton kernel for Hopper, as its wrapper launches it; test_kernels_compiled.py runs this file.

It needs its own process, because the driver that stands in for a GPU's cannot be removed again.
"""

import math
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
import triton
from torch import Tensor
from triton.compiler.errors import CompilationError

from hopper import Launch, all_kernels, assemble, called_by_others, full_name, lower, narrow, recorded
from xorl.kernels import grouped_triton
from xorl.kernels.attention import paged_triton
from xorl.kernels.experts import products_triton, routing_triton, rows_triton
from xorl.kernels.experts.gates import GELU_TANH, SILU, Gate
from xorl.kernels.experts.products import Rows
from xorl.kernels.fused import cross_entropy, heads, reference, rms_norm, swiglu, widened_sum
from xorl.kernels.fused.reference import HeadNorms, HeadShape
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.optim import Noise, triton_lists, triton_symmetric, triton_updates
from xorl.kernels.quant import WeightNoise, blocks_triton, fp8_triton
from xorl.kernels.quant.fp8 import E4M3, E5M2
from xorl.kernels.recurrent import delta_triton, space_triton

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FLOATS = (BF16, FP16, FP32)
# The first number that does not fit into a signed integer of 32 bits.
BEYOND_INT32 = 2**31
# Registers of a Hopper multiprocessor, shared by all programs on it.
REGISTERS = 65_536


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Uninitialised memory. It is never touched, so its size does not matter."""
    return torch.empty(shape, dtype=dtype)


def loss_of(num_rows: int) -> reference.RowLosses:
    return reference.RowLosses(*(empty(num_rows, dtype=dtype) for dtype in (FP32, torch.bool, FP32, FP32)))


def part_of(num_rows: int) -> reference.PartLosses:
    return reference.PartLosses(*(empty(num_rows, dtype=FP32) for _ in reference.PartLosses._fields))


def losses() -> None:
    """Cross-entropy without a gradient, and with one that overwrites the logits or does not."""
    num_rows, vocab_size = 16, 50_304
    labels = empty(num_rows, dtype=torch.int64)
    for dtype, weight_dtype in product(FLOATS, (None, BF16, FP32)):
        logits = empty(num_rows, vocab_size, dtype=dtype)
        weight = None if weight_dtype is None else empty(num_rows, dtype=weight_dtype)
        for gradient in (None, logits, empty(num_rows, vocab_size, dtype=BF16)):
            cross_entropy.cross_entropy_rows(logits, labels, weight, gradient, loss_of(num_rows))
            cross_entropy.cross_entropy_part(logits, labels, gradient, part_of(num_rows))
    for dtype in FLOATS:
        cross_entropy.scale_(empty(num_rows, vocab_size, dtype=dtype), empty(dtype=FP32))
        cross_entropy.add_at_labels_(
            empty(vocab_size, 4096, dtype=dtype), empty(num_rows, 4096), labels, empty(num_rows, dtype=FP32)
        )


def norms() -> None:
    """Norms and their gradients, with and without a residual, for weights of the same or another dtype."""
    num_rows, dtypes = 8192, [*zip(FLOATS, FLOATS, strict=True), (BF16, FP32)]
    rstd = empty(num_rows, dtype=FP32)
    for width, (dtype, weight_dtype) in product((576, 4096, 16_384), dtypes):
        x, weight = empty(num_rows, width, dtype=dtype), empty(width, dtype=weight_dtype)
        rms_norm._rms_norm(x, weight, 1e-6, 0.0)
        rms_norm._add_rms_norm(x, x, weight, 1e-6, 0.0)
        for grad_summed in (None, x):
            rms_norm._rms_norm_backward(x, grad_summed, x, weight, rstd, 1.0)


def split_heads() -> None:
    """Heads and their gradients from merged and separate projections, with and without norms and rotary positions."""
    num_tokens, usual, unusual = 1100, HeadShape(32, 8, 128), HeadShape(9, 3, 96)
    cases = (usual, BF16), (unusual, FP16), (unusual, FP32)
    for (shape, dtype), (has_norms, has_rope) in product(cases, ((True, True), (True, False), (False, True))):
        weight = empty(shape.head_dim, dtype=dtype).requires_grad_() if has_norms else None
        norms = None if weight is None else HeadNorms(weight, weight, 1e-6)
        table = empty(num_tokens, shape.head_dim // 2, dtype=FP32)
        for merged in (True, False):
            projected = empty(num_tokens, sum(shape.row_counts), dtype=dtype).requires_grad_()
            parts = (projected,) if merged else projected.split(shape.row_counts, dim=-1)
            outputs = heads.split_heads(parts, shape, norms, (table, table) if has_rope else None)
            torch.autograd.backward(outputs, [empty(*output.shape, dtype=dtype) for output in outputs])


def gated() -> None:
    """SwiGLU and its gradient."""
    for width, dtype in product((12_288, 1000), FLOATS):
        gate_up = empty(64, 2 * width, dtype=dtype)
        swiglu._swiglu(gate_up)
        for backward in (swiglu._swiglu_backward, swiglu._swiglu_backward_):
            backward(empty(64, width, dtype=dtype), gate_up)


def fp8_casts() -> None:
    """All casts to both formats, and the largest absolute value of a tensor and of its rows and columns."""
    for shape, dtype in (((256, 512), BF16), ((37, 48), FP16), ((37, 48), FP32)):
        x, amax = empty(*shape, dtype=dtype), fp8_triton.amax(empty(*shape, dtype=dtype))
        for to in (E4M3, E5M2):
            q, *_ = fp8_triton.cast_tensorwise_both(x, amax, to)
            fp8_triton.cast_into_(x, amax, q, empty(dtype=FP32))
            fp8_triton.cast_rowwise(x, to)
            fp8_triton.cast_columnwise(x, to)
            fp8_triton.cast_axiswise(x, to)
            fp8_triton.transpose(q)
        fp8_triton.cast_stack_columnwise(empty(128, *shape, dtype=dtype), E4M3)


def quantized_weights() -> None:
    """All formats in all dtypes, in one also with unusual group sizes, with and without noise."""
    noises = (None, WeightNoise(0.5, torch.tensor([12345, 7, 0])))
    for dtype in FLOATS:
        x, wide = empty(256, 4096, dtype=dtype), empty(256, dtype=FP32)
        for size in (16, 64, 1024) if dtype is BF16 else (64,):
            nf4 = blocks_triton.quantize_nf4(x, size)
            nvfp4 = blocks_triton.quantize_nvfp4(x, wide, size)
            for noise in noises:
                blocks_triton.dequantize_nf4(*nf4, dtype, noise)
                blocks_triton.dequantize_nvfp4(*nvfp4, wide, dtype, noise)
        for size in (16, 128) if dtype is BF16 else (128,):
            codes, scales = blocks_triton.quantize_block_fp8(x, size)
            for noise in noises:
                blocks_triton.dequantize_block_fp8(codes, scales, size, dtype, noise)


def updates(count: int = 5000, dtypes: tuple[torch.dtype, ...] = (FP32, BF16)) -> None:
    """All updates, with and without noise and scaled gradients, for unaligned tensors and counters beyond 32 bits."""
    scalar = empty(dtype=FP32)
    noise = Noise(2**31 - 1, 2**40 + 1, torch.tensor(7))
    hyper = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    for dtype, grad_dtype, grad_scale in product(dtypes, dtypes, (None, scalar)):
        param, grad = empty(count + 1, dtype=dtype)[1:], empty(count, dtype=grad_dtype)
        options = {"grad_scale": grad_scale, "skip": scalar}
        for update, nesterov in ((None, False), (grad, False), (empty(count, dtype=BF16), True)):
            rates = {"momentum": 0.9, "nesterov": nesterov}
            triton_updates.momentum_(param, grad, update, **rates, **options, noise=noise)
        for drawn in (noise, None):
            triton_updates.descend_(param, grad, decay=0.1, rate=0.1, **options, noise=drawn)
            whole = empty(count, dtype=dtype)
            noises = None if drawn is None else [drawn]
            for tensors in ((whole, grad, whole, whole), (whole, grad, empty(count, dtype=BF16), param)):
                lists = ([tensor] for tensor in tensors)
                triton_lists.adamw_(*lists, **hyper, **options, corrections=empty(1, 2, dtype=FP32), noises=noises)
    for dtype in dtypes:
        triton_updates.scale_(empty(count, dtype=dtype), scalar)
        triton_lists.square_sum([empty(count, dtype=dtype), empty(count + 1, dtype=dtype)[1:]])


def symmetric_products() -> None:
    """Symmetric products of rows and of columns, with and without an added matrix."""
    for dtype, in_rows, is_added in product((BF16, FP16), (True, False), (True, False)):
        x = empty(2, 576, 1536, dtype=dtype) if in_rows else empty(2, 1536, 576, dtype=dtype).mT
        added = empty(2, 576, 576, dtype=dtype) if is_added else None
        triton_symmetric.symmetric_product(x, added, alpha=2.0, beta=-1.0)


def paged() -> None:
    """Paged attention for few sequences, whose keys are split over programs, and many; some with a window and sinks."""
    for dtype, count, (num_heads, kv_heads, head_dim), window in product(
        (BF16, FP16), (2, 256), ((32, 8, 128), (9, 3, 96), (4, 2, 8)), (None, 100)
    ):
        q, keys = empty(count, num_heads, head_dim, dtype=dtype), empty(1024, kv_heads, head_dim, dtype=dtype)
        tables, lengths = empty(40, count, dtype=torch.int64), empty(count, dtype=torch.int64)
        sinks = None if window is None else empty(num_heads, dtype=dtype)
        options = {"block_size": 16, "scale": 0.1, "window": window, "sinks": sinks}
        paged_triton.paged_attention(q, keys, keys, tables, lengths, **options)


def sums() -> None:
    """Sums of the gradients of two and eight ranks."""
    for dtype, num_others in product((FP32, BF16), (1, 7)):
        widened_sum.widened_sum_(
            empty(5000, dtype=FP32), empty(5000, dtype=dtype), empty(num_others, 5000, dtype=dtype)
        )


def experts(num_tokens: int = 64) -> None:
    """The products of experts, everything between them, and the choice of experts."""
    rows, ends = empty(num_tokens, 8, dtype=torch.int32), empty(128, dtype=torch.int32)
    weights = empty(num_tokens, 8, dtype=FP32)
    for width, dtype in ((768, BF16), (3000, FP16), (3000, FP32)):
        y, up = empty(8 * num_tokens, width, dtype=dtype), empty(8 * num_tokens, 2 * width, dtype=dtype)
        clamped = Gate(alpha=1.7, limit=7.0, offset=1.0)
        # The last one is what most models use.
        gates = (GELU_TANH, None), (clamped, empty(128, 2 * width, dtype=dtype)), (SILU, None)
        rows_triton.combine(y, weights, rows, ends)
        rows_triton.combine(y, None, rows, ends)
        for gate, biases in gates:
            rows_triton.gated(up, ends, gate, biases)
        rows_triton.sum_parts(empty(4, 8 * num_tokens, width, dtype=dtype))
        rows_triton.combine(y, weights, rows, ends, empty(num_tokens, width, dtype=dtype))
        rows_triton.combine(y, None, rows, ends, empty(num_tokens, width, dtype=dtype))
        for gate, biases in gates:
            of_weights = empty(num_tokens, 8, dtype=FP32)
            rows_triton.gated_backward(y, up, weights, rows.flatten(), ends, of_weights, gate, biases)
        stacked, index = empty(128, 2 * width, 512, dtype=dtype), empty(8 * num_tokens, dtype=torch.int32)
        for x in (Rows(empty(8 * num_tokens, 512, dtype=dtype)), Rows(empty(num_tokens, 512, dtype=dtype), index)):
            products_triton.product(x, stacked.transpose(1, 2), ends)
            for keep_up, options in product((True, False), gates):
                products_triton.gated(x, stacked.transpose(1, 2), ends, *options, keep_up=keep_up)
            products_triton.outer(Rows(up), x, ends)
            products_triton.outer(x, Rows(up), ends)
            products_triton.add_outer(empty(128, 2 * width, 512, dtype=dtype), Rows(up), x, ends)
            products_triton.add_outer(empty(128, 512, 2 * width, dtype=dtype), x, Rows(up), ends)
        products_triton.product(Rows(up), stacked, ends)
        products_triton.add_product(empty(8 * num_tokens, 512, dtype=dtype), Rows(up), stacked, ends)
        products_triton.product(Rows(up), empty(128, 2 * width, 16, dtype=dtype), ends)
    codes, index = empty(num_tokens, 512, dtype=E4M3), empty(8 * num_tokens, dtype=torch.int32)
    weight, of_columns = empty(128, 1536, 512, dtype=E4M3).transpose(1, 2), empty(128, 1536, dtype=FP32)
    for dtype, is_fast in product((BF16, FP32), (True, False)):
        scales = products_triton.Scales(empty(num_tokens, dtype=FP32), of_columns, is_fast)
        products_triton.product(Rows(codes, index), weight, ends, scales=scales, dtype=dtype)
        added = empty(128, 1536, dtype=dtype)
        options = {"keep_up": True, "scales": scales, "dtype": dtype}
        products_triton.gated(Rows(codes, index), weight, ends, clamped, added, **options)
    for dtype in (BF16, FP32):
        grouped_triton.clear_empty_groups_(empty(128, 1536, 2048, dtype=dtype), ends)
    for num_experts in (60, 128):
        scores = empty(num_tokens, num_experts, dtype=FP32)
        routing_triton.top_experts(scores, 8)
        ids, cu_seqlens = empty(num_tokens, 8, dtype=torch.int64), empty(num_experts, dtype=torch.int32)
        lse = empty(num_tokens, dtype=FP32)
        grads = empty(num_experts - 1, num_experts, dtype=FP32), empty(num_experts - 1, dtype=FP32)
        for num_real in (None, torch.tensor(1), torch.tensor(1, dtype=torch.int32)):
            routing_triton.sum_routing(scores, scores, ids, cu_seqlens, num_real)
            routing_triton.sum_routing_backward(*grads, scores, lse, cu_seqlens, num_real)


def recurrences(num_tokens: int = 512) -> None:
    """The gradients of chunks of the gated delta rule, and state spaces, of usual and unusual heads."""
    starts, chunks = empty(3, dtype=torch.int32), empty(num_tokens // 64, 2, dtype=torch.int32)
    for dtype, (key_heads, heads_of_values, key_dim, value_dim) in product(
        (FP32, BF16), ((1, 2, 80, 48), (16, 32, 256, 256), (16, 32, 128, 128))
    ):
        keys = empty(num_tokens, key_heads, key_dim, dtype=dtype)
        values = empty(num_tokens, heads_of_values, value_dim, dtype=dtype)
        g = empty(num_tokens, heads_of_values, dtype=FP32)
        states = empty(len(chunks), heads_of_values, key_dim, value_dim, dtype=dtype)
        delta_triton.chunk_gradients(keys, keys, values, values, values, g, states, states, starts, chunks, 1.0)
    for dtype, (num_heads, num_groups, head_dim, state_dim) in product(
        (FP32, BF16), ((4, 2, 80, 72), (48, 1, 64, 256), (128, 8, 64, 128))
    ):
        x, b = (empty(num_tokens, *sizes, dtype=dtype) for sizes in ((num_heads, head_dim), (num_groups, state_dim)))
        dt, a = empty(num_tokens, num_heads, dtype=FP32), empty(num_heads, dtype=FP32)
        layout = SequenceLayout.from_lengths([num_tokens])
        leaves = [each.requires_grad_() for each in (x, dt, a, b, b, a)]
        space_triton.state_space(*leaves, layout).backward(x)


CALLS = (
    losses,
    norms,
    split_heads,
    gated,
    experts,
    fp8_casts,
    quantized_weights,
    updates,
    symmetric_products,
    paged,
    sums,
    recurrences,
)


@cache
def launches_of(call: Callable[[], None]) -> list[Launch]:
    with recorded() as launches:
        call()
    return launches


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_all_variants_pass_the_compiler(call: Callable[[], None]) -> None:
    # Catches errors that the interpreter accepts: variables that change their type between branches or iterations,
    # operations that a dtype does not have, and block lengths that are not powers of two.
    failed: dict[str, str] = {}
    for launch in {launch.key: launch for launch in launches_of(call)}.values():
        try:
            lower(launch, "ttir")
        except CompilationError as error:
            failed[launch.key] = str(error)
    assert not failed, "\n\n".join(f"{key}:\n{message}" for key, message in failed.items())


def test_every_kernel_is_among_those_compiled() -> None:
    # Catches a kernel that none of the calls launches, so that only a GPU would show that it does not compile.
    launched = {launch.kernel for call in CALLS for launch in launches_of(call)}
    missing = [
        kernel.__name__ for kernel in all_kernels() if kernel not in launched and kernel not in called_by_others()
    ]
    assert not missing, f"launch them in one of {[call.__name__ for call in CALLS]}: {missing}"


def beyond_int32() -> None:
    """Launch the kernels that take integers with tensors of more than 2^31 elements."""
    rows, width = BEYOND_INT32 // 2048 + 1, 2048
    x, weight = empty(rows, width), empty(width)
    labels = empty(rows, dtype=torch.int64)
    cross_entropy.cross_entropy_rows(x, labels, None, x, loss_of(rows))
    cross_entropy.cross_entropy_part(x, labels, x, part_of(rows))
    cross_entropy.scale_(x, empty(dtype=FP32))
    cross_entropy.add_at_labels_(x, x[:16], empty(16, dtype=torch.int64), empty(16, dtype=FP32))
    rms_norm._rms_norm_backward(x, x, x, weight, empty(rows, dtype=FP32), 0.0)
    shape, table = HeadShape(14, 1, 128), empty(rows, 64, dtype=FP32)
    norms = HeadNorms(empty(128).requires_grad_(), empty(128).requires_grad_(), 1e-6)
    outputs = heads.split_heads((x,), shape, norms, (table, table))
    torch.autograd.backward(outputs, [empty(*output.shape) for output in outputs])
    amax = fp8_triton.amax(x)
    fp8_triton.transpose(fp8_triton.cast_tensorwise_both(x, amax, E4M3)[0])
    fp8_triton.cast_axiswise(x, E4M3)
    wide, noise = empty(rows, dtype=FP32), WeightNoise(0.5, torch.tensor([12345, 7, 0]))
    blocks_triton.dequantize_nf4(*blocks_triton.quantize_nf4(x, 16), BF16, noise)
    blocks_triton.dequantize_nvfp4(*blocks_triton.quantize_nvfp4(x, wide, 16), wide, BF16, noise)
    blocks_triton.dequantize_block_fp8(*blocks_triton.quantize_block_fp8(x, 16), 16, BF16, noise)
    updates(x.numel(), (BF16,))
    stacked = empty(BEYOND_INT32 // 2**24 + 1, 4096, 4096)
    triton_symmetric.symmetric_product(stacked, stacked, alpha=1.0, beta=1.0)
    ends = empty(len(stacked), dtype=torch.int32)
    products_triton.product(Rows(empty(BEYOND_INT32 // 4096 + 1, 4096)), stacked.transpose(1, 2), ends)
    q, keys = empty(2, 32, 128), empty(BEYOND_INT32 // 1024 + 1, 8, 128)
    tables, lengths = empty(2**20, 2, dtype=torch.int64), empty(2, dtype=torch.int64)
    paged_triton.paged_attention(q, keys, keys, tables, lengths, block_size=16, scale=0.1, window=None)


def test_no_integer_is_cut_to_32_bits() -> None:
    # Catches a number of elements, an offset or a key annotated as `int`, which Triton takes as one of 32 bits.
    too_large: set[str] = set()
    seen: set[triton.JITFunction] = set()

    def see(kernel: triton.JITFunction, values: dict[str, object]) -> None:
        seen.add(kernel)
        for parameter in narrow(kernel):
            value = values[parameter]
            assert isinstance(value, int)
            if not -BEYOND_INT32 <= value < BEYOND_INT32:
                too_large.add(f"{full_name(kernel)}, {parameter}: {value}")

    with recorded(see):
        beyond_int32()
    assert not too_large, f"annotate them tl.int64: {sorted(too_large)}"
    unseen = [
        full_name(kernel) for kernel in all_kernels() if narrow(kernel) and kernel not in seen | called_by_others()
    ]
    assert not unseen, f"launch them in beyond_int32: {unseen}"


def usual_sizes() -> None:
    """Launch each kernel whose speed matters, with the shapes of a model of 8B parameters."""
    tokens, width, hidden_width, shape = 8192, 4096, 12_288, HeadShape(32, 8, 128)
    x, weight, rstd = empty(tokens, width), empty(width), empty(tokens, dtype=FP32)
    rms_norm._add_rms_norm(x, x, weight, 1e-6, 0.0)
    rms_norm._rms_norm_backward(x, x, x, weight, rstd, 0.0)
    gate_up = empty(tokens, 2 * hidden_width)
    swiglu._swiglu(gate_up)
    swiglu._swiglu_backward_(empty(tokens, hidden_width), gate_up)
    table, norms = empty(tokens, 64, dtype=FP32), HeadNorms(empty(128).requires_grad_(), empty(128), 1e-6)
    outputs = heads.split_heads((empty(tokens, sum(shape.row_counts)),), shape, norms, (table, table))
    torch.autograd.backward(outputs, [empty(*output.shape) for output in outputs])
    logits, gradient = empty(512, 151_936, dtype=FP32), empty(512, 151_936)
    labels = empty(512, dtype=torch.int64)
    cross_entropy.cross_entropy_rows(logits, labels, None, gradient, loss_of(512))
    cross_entropy.cross_entropy_part(logits, labels, gradient, part_of(512))
    fp8_triton.cast_tensorwise_both(x, fp8_triton.amax(x), E4M3)
    fp8_triton.cast_axiswise(x, E4M3)
    fp8_triton.cast_rowwise(x, E4M3)
    fp8_triton.cast_stack_columnwise(empty(128, 1536, 2048), E4M3)
    blocks_triton.dequantize_nf4(*blocks_triton.quantize_nf4(x, 64), BF16, None)
    wide = empty(tokens, dtype=FP32)
    blocks_triton.dequantize_nvfp4(*blocks_triton.quantize_nvfp4(x, wide, 16), wide, BF16, None)
    blocks_triton.dequantize_block_fp8(*blocks_triton.quantize_block_fp8(x, 128), 128, BF16, None)
    noise, count = Noise(12_345, 0, torch.tensor(7)), 2**20
    options = {"grad_scale": empty(dtype=FP32), "skip": empty(dtype=FP32)}
    param, grad = empty(count), empty(count)
    triton_updates.momentum_(param, grad, grad, momentum=0.9, nesterov=True, **options, noise=noise)
    triton_updates.descend_(param, grad, decay=0.1, rate=0.1, **options, noise=noise)
    rates = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    corrections = empty(1, 2, dtype=FP32)
    triton_lists.adamw_(*([param] for _ in range(4)), **rates, **options, corrections=corrections, noises=[noise])
    triton_lists.square_sum([grad])
    widened_sum.widened_sum_(empty(count, dtype=FP32), grad, empty(1, count))
    recurrences(8192)
    experts(8192)
    grad, ends = Rows(empty(tokens, 2 * 768)), empty(128, dtype=torch.int32)
    gathered = Rows(empty(tokens, 2048), empty(8 * tokens, dtype=torch.int32))
    products_triton.gated(gathered, empty(128, 2 * 768, 2048).transpose(1, 2), ends, SILU, None, keep_up=True)
    products_triton.outer(grad, gathered, ends)


# By kernel: the number of warps for which a multiprocessor must have registers, and the number of loads and stores of
# fewer than four bytes that are allowed, for single values such as labels and the ends of a chunk.
HOT = {
    "fused.rms_norm._forward": (64, 0),
    "fused.rms_norm._backward": (16, 0),
    "fused.partial._sum": (32, 1),
    "fused.swiglu._forward": (64, 0),
    "fused.swiglu._backward": (20, 0),
    "fused.heads_triton.forward": (28, 0),
    "fused.heads_triton.backward": (20, 0),
    "fused.cross_entropy._cross_entropy_rows": (32, 3),
    "fused.cross_entropy._cross_entropy_part": (32, 3),
    "quant.fp8_triton._amax_kernel": (64, 0),
    "quant.fp8_triton._axis_amax_kernel": (16, 0),
    "quant.fp8_triton._cast_kernel": (16, 0),
    "quant.fp8_triton._cast_rows_kernel": (64, 0),
    "quant.fp8_triton._cast_columns_kernel": (32, 0),
    "quant.blocks_triton._dequantize_nf4": (64, 0),
    "quant.blocks_triton._dequantize_nvfp4": (64, 1),
    "quant.blocks_triton._dequantize_block_fp8": (64, 0),
    "optim.triton_updates._momentum": (48, 0),
    "optim.triton_updates._descend": (48, 0),
    "optim.triton_lists._adamw": (28, 56),
    "optim.triton_lists._square_sum": (64, 8),
    "fused.widened_sum._widened_sum": (48, 0),
    "recurrent.delta_triton._kernel": (8, 0),
    "recurrent.space_triton._pass_states": (16, 0),
    "recurrent.space_triton._read": (8, 0),
    "recurrent.space_triton._differentiate_x": (8, 0),
    "recurrent.space_triton._differentiate_b_c": (8, 0),
    "experts.rows_triton._gated": (48, 0),
    "experts.rows_triton._sum_parts": (40, 0),
    "experts.products_triton._product": (8, 0),
    "experts.products_triton._outer": (8, 0),
}


def test_kernels_leave_room_for_warps_and_read_widely(tmp_path: Path) -> None:
    # Catches spilled registers, too few warps to hide the latency of memory, loads and stores that are narrow because
    # the compiler does not know an alignment, and casts that do not use the instruction.
    with recorded() as launches:
        usual_sizes()
    last = {full_name(launch.kernel): launch for launch in launches}
    for name, (wanted_warps, most_narrow) in HOT.items():
        launch = last[f"xorl.kernels.{name}"]
        machine = assemble(launch, tmp_path)
        # Registers are allocated in multiples of eight.
        registers = math.ceil(machine.registers / 8) * 8 * 32 * launch.num_warps
        warps = REGISTERS // registers * launch.num_warps
        assert machine.spilled_bytes == 0, f"{name} spills {machine.spilled_bytes} bytes"
        # Other versions of the compiler allocate registers differently; the kernels were tuned for this one.
        is_tuned = triton.__version__.startswith("3.6.")
        found = f"{warps} warps of {machine.registers} registers"
        assert warps >= wanted_warps or not is_tuned, f"{name}: {found}, not {wanted_warps}"
        assert machine.narrow_accesses <= most_narrow, f"{name}: {machine.narrow_accesses} narrow loads and stores"
        if name.endswith("_cast_kernel"):
            assert "cvt.rn.satfinite.e4m3x2.f32" in machine.ptx
