"""Fused kernels against their plain twins in Triton's interpreter; test_kernels_fused.py runs this file.

bf16 is tested in tests/gpu, because the interpreter does not round it as a GPU does.
"""

import itertools

import pytest
import torch

from xorl.kernels import grouped_triton
from xorl.kernels.attention import AttentionSpec, KeyValueCache, MixedLayout, paged_triton
from xorl.kernels.attention.cached import plain_cached_attention
from xorl.kernels.experts import products_native, products_triton, routing_triton, rows, rows_triton
from xorl.kernels.experts.gates import GELU_TANH, SILU, Gate
from xorl.kernels.experts.plan import RoutePlan
from xorl.kernels.experts.products import Rows
from xorl.kernels.experts.routing import _sum_routing, _sum_routing_backward, top_experts
from xorl.kernels.fused import cross_entropy, device, heads, partial, reference, rms_norm, swiglu, widened_sum
from xorl.kernels.fused.reference import HeadNorms, HeadShape
from xorl.kernels.recurrent import delta_triton
from xorl.kernels.testing import (
    TOLERANCES,
    assert_close,
    assert_matches_reference,
    mend_interpreter,
    nan_poisoned_empty,
)

mend_interpreter()

# Large enough that gradients of the norm of two values are not lost to cancellation.
EPS = 0.1
DTYPES = [torch.float32, torch.float16]
# So low a limit that many values exceed it.
CLAMPED = Gate(alpha=1.7, limit=0.8, offset=1.0)
GATES = [SILU, GELU_TANH, CLAMPED]


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1.0, -0.5])
def test_scale(dtype, factor):
    # Catches a factor that is applied twice, never, or not to the last block.
    x = randn(7, 2501, dtype=dtype)
    wanted = x * factor
    cross_entropy.scale_(x, torch.tensor(factor))
    assert torch.equal(x, wanted)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"), [*((dtype, dtype) for dtype in DTYPES), (torch.float16, torch.float32)], ids=str
)
@pytest.mark.parametrize(("num_rows", "width", "offset"), [(1, 2, 0.0), (3, 5, 1.0), (5, 2049, 1.0)])
def test_rms_norm(num_rows, width, offset, dtype, weight_dtype):
    # Catches wrong gradients for fewer or more rows than a program takes, and for widths that fill no block.
    x, weight = randn(num_rows, width, dtype=dtype), randn(width, dtype=weight_dtype, seed=1)
    rounded = weight.to(dtype).to(weight_dtype)
    tolerance = TOLERANCES[dtype]
    assert_matches_reference(
        lambda x, w: rms_norm.add_rms_norm(x, None, w, EPS, offset),
        lambda x, w: reference.add_rms_norm(x, None, w, EPS, offset),
        (x, rounded),
        tolerance=tolerance,
    )
    assert_matches_reference(
        lambda x, r, w: rms_norm.add_rms_norm(x, r, w, EPS, offset),
        lambda x, r, w: reference.add_rms_norm(x, r, w, EPS, offset),
        (x, randn(num_rows, width, dtype=dtype, seed=2), rounded),
        tolerance=tolerance,
    )


def rope_tables(num_tokens, head_dim):
    angles = 7 * randn(num_tokens, head_dim // 2, seed=9)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "shape", "has_norms", "has_rope", "dtype"),
    [
        *itertools.product([5], [(3, 1, 6)], [True, False], [True, False], DTYPES),
        (1, (1, 1, 2), True, True, torch.float32),
        (2, (20, 4, 128), True, True, torch.float16),
    ],
)
def test_split_heads(num_tokens, shape, has_norms, has_rope, merged, dtype):
    # Catches keys normed with the queries' weight, halves rotated the wrong way, and gradients in wrong columns.
    shape = HeadShape(*shape)
    rope = rope_tables(num_tokens, shape.head_dim) if has_rope else None
    projected = randn(num_tokens, sum(shape.row_counts), dtype=dtype)
    parts = (projected,) if merged else projected.split(shape.row_counts, dim=-1)
    weights = [randn(shape.head_dim, dtype=dtype, seed=seed) for seed in (1, 2)] if has_norms else []

    def run(function, *inputs):
        inputs, weights = inputs[: len(parts)], inputs[len(parts) :]
        norms = HeadNorms(*weights, EPS, offset=float(not merged)) if weights else None
        return function(inputs, shape, norms, rope)

    assert_matches_reference(
        lambda *inputs: run(heads.split_heads, *inputs),
        lambda *inputs: run(reference.split_heads, *inputs),
        (*parts, *weights),
    )


def test_more_rows_than_programs(monkeypatch):
    # Catches a program that skips its second row or its part of the weights' gradient, and wrong boundaries of
    # prefetched rows and of sums over several programs.
    monkeypatch.setattr(device, "NUM_PROCESSORS", 1)
    monkeypatch.setattr(partial, "MAX_ROWS", 4)
    shape, rope = HeadShape(3, 1, 2), rope_tables(19, 2)

    def run(function, qkv, q_weight, k_weight):
        return function((qkv,), shape, HeadNorms(q_weight, k_weight, EPS), rope)

    assert_matches_reference(
        lambda *inputs: run(heads.split_heads, *inputs),
        lambda *inputs: run(reference.split_heads, *inputs),
        (randn(19, 10), randn(2, seed=1), randn(2, seed=2)),
    )
    for width in (3, 700):  # with and without prefetching of the next row
        assert_matches_reference(
            lambda x, residual, weight: rms_norm.add_rms_norm(x, residual, weight, EPS),
            lambda x, residual, weight: reference.add_rms_norm(x, residual, weight, EPS),
            (randn(35, width), randn(35, width, seed=2), randn(width, seed=1)),
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 7), (2, 2500)])
def test_swiglu(num_rows, width, dtype):
    # Catches swapped gate and up, and a block that reaches into the other half.
    gate_up = randn(num_rows, 2 * width, dtype=dtype)
    assert_matches_reference(swiglu.swiglu, reference.swiglu, (gate_up,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_swiglu_and_the_linear_layer_after_it(has_bias, dtype):
    # Catches a weight gradient from values that the layer did not use, and gradients that are not needed.
    sizes = [(5, 14), (3, 7), (3,)] if has_bias else [(5, 14), (3, 7)]
    inputs = [randn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(sizes)]

    def run(function, gate_up, weight, bias=None):
        return function(gate_up, weight, bias)

    assert_matches_reference(
        lambda *leaves: run(swiglu.swiglu_linear, *leaves),
        lambda *leaves: run(reference.swiglu_linear, *leaves),
        inputs,
    )
    gate_up = inputs[0].requires_grad_()
    with nan_poisoned_empty():
        run(swiglu.swiglu_linear, *inputs).sum().backward()
    assert gate_up.grad.isfinite().all()
    assert all(x.grad is None for x in inputs[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_of_swiglu_can_be_replaced_by_the_output(dtype):
    # Catches elements that are written before they are read, and an overwritten gradient that is still needed.
    grad, gate_up = randn(5, 7, dtype=dtype), randn(5, 14, dtype=dtype, seed=1)
    kept = grad.clone()
    wanted = swiglu._swiglu_backward(grad, gate_up)
    assert torch.equal(grad, kept)
    assert torch.equal(swiglu._swiglu_backward_(grad, gate_up), wanted)
    assert torch.equal(grad, swiglu.swiglu(gate_up))


def test_no_tokens():
    # Catches an empty launch, which the driver rejects.
    shape = HeadShape(2, 1, 4)
    weight = torch.ones(4, requires_grad=True)
    q, k, v = heads.split_heads((torch.empty(0, 16),), shape, HeadNorms(weight, weight, EPS), rope_tables(0, 4))
    summed, normed = rms_norm.add_rms_norm(torch.empty(0, 4), torch.empty(0, 4), weight, EPS)
    sum(x.sum() for x in (q, k, v, summed, normed, swiglu.swiglu(torch.empty(0, 6)))).backward()
    assert torch.equal(weight.grad, torch.zeros(4))


@pytest.mark.parametrize("merged", [True, False])
def test_kernels_compile_into_one_graph(merged):
    # Catches an operator that torch.compile cannot trace, fake functions with wrong shapes or strides, and a gated
    # activation that is kept for the product after it.
    shape = HeadShape(2, 1, 4)
    rope = rope_tables(6, 4)

    def layer(x, weight, q_weight, k_weight, down):
        x, normed = rms_norm.add_rms_norm(x, 2 * x, weight, EPS)
        projected = (normed,) if merged else normed.split(shape.row_counts, dim=-1)
        q, k, v = heads.split_heads(projected, shape, HeadNorms(q_weight, k_weight, EPS), rope)
        mixed = (q * 2).flatten(-2) + torch.cat((k * 3, v * 4), dim=1).flatten(-2)
        again = rms_norm.add_rms_norm(mixed + x[:, :8], None, weight[:8], EPS)
        gate_up = torch.cat((*again, 2 * normed[:, :6]), dim=-1)
        return swiglu.swiglu_linear(gate_up, down, None).square().sum()

    sizes = [(6, 16), (16,), (4,), (4,), (3, 11)]
    leaves = [randn(*size, seed=seed).requires_grad_() for seed, size in enumerate(sizes)]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    wanted = torch.autograd.grad(layer(*leaves), leaves)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        result = compiled(*leaves)
    torch.testing.assert_close(torch.autograd.grad(result, leaves), wanted)
    assert (6, 22) in kept
    assert (6, 11) not in kept


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_others", "count"), [(1, 1), (1, 2048), (3, 5001)])
def test_widened_sum(num_others, count, dtype):
    # Catches a sum in the dtype of the addends, rows at wrong offsets, and a last block that exceeds the end.
    first, others = randn(count, dtype=dtype), randn(num_others, count + 7, dtype=dtype, seed=1)[:, :count]
    out = torch.full((count + 1,), float("nan"))
    assert widened_sum.widened_sum_(out[:count], first, others).data_ptr() == out.data_ptr()
    assert torch.equal(out[:count], reference.widened_sum_(torch.empty(count), first, others))
    assert out[count].isnan()


@pytest.mark.parametrize(("programs_per_processor", "has_sinks"), [(0, False), (0, True), (8, True)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "totals"),
    [(4, 2, 64, None, [1, 37, 130]), (8, 2, 96, 20, [5, 90]), (2, 2, 32, None, [64]), (3, 1, 16, 1, [16, 17, 33])],
)
def test_paged_attention(monkeypatch, heads, kv_heads, head_dim, window, totals, programs_per_processor, has_sinks):
    # Catches blocks in the wrong order, a window or last block that is off by one, query heads with the wrong key head
    # or sink, wrong weights of parts, sinks that count once for each part, and parts without keys.
    monkeypatch.setattr(paged_triton, "PROGRAMS_PER_PROCESSOR", programs_per_processor)
    blocks = iter(torch.randperm(32, generator=torch.Generator().manual_seed(1)).tolist())
    tables = [[next(blocks) for _ in range(-(-total // 16))] for total in totals]
    cache = KeyValueCache(
        layers=[(kv_heads, head_dim)], num_blocks=32, block_size=16, dtype=torch.float32, device=torch.device("cpu")
    )
    keys, values = (randn(*cache.keys[0].shape, seed=seed) for seed in (2, 3))
    layout = MixedLayout(cache, tables, [1] * len(totals), totals, "cpu")
    q = randn(len(totals), heads, head_dim)
    sinks = randn(heads, seed=4) if has_sinks else None
    wanted = plain_cached_attention(q, keys, values, layout, AttentionSpec(0.125, window), sinks)
    # Keys of other sequences, and those past a sequence's end, must not affect the result.
    read = {
        16 * table[place // 16] + place % 16
        for table, total in zip(tables, totals, strict=True)
        for place in range(total)
    }
    unread = [row for row in range(len(keys)) if row not in read]
    keys[unread], values[unread] = float("nan"), float("nan")
    with nan_poisoned_empty():
        found = paged_triton.paged_attention(
            q,
            keys,
            values,
            layout.tables.t(),
            layout.total_lengths,
            block_size=16,
            scale=0.125,
            window=window,
            sinks=sinks,
            block_keys=16,
        )
    assert_close("attended", found, wanted, TOLERANCES[torch.float32])


@pytest.mark.parametrize("max_block", [2048, 16])
@pytest.mark.parametrize("num_padding", [0, 3])
@pytest.mark.parametrize(("num_tokens", "num_choices", "width", "num_experts"), [(13, 3, 24, 7), (5, 1, 40, 3)])
def test_between_the_products_of_experts(
    monkeypatch, num_tokens, num_choices, width, num_experts, num_padding, max_block
):
    # Catches the weight of another choice, padding that is read, and a last block that exceeds the row.
    monkeypatch.setattr(rows_triton, "MAX_BLOCK", max_block)
    ids = randn(num_tokens, num_experts).topk(num_choices).indices
    plan = RoutePlan.of(ids, num_experts, torch.tensor(num_tokens - num_padding))
    num_read = num_choices * (num_tokens - num_padding)
    y = randn(len(plan.choices), width + 1, seed=width + 1)
    y[num_read:] = float("nan")
    weights = randn(num_tokens, num_choices, seed=5)
    with nan_poisoned_empty():
        for given in (weights, None):
            wanted = rows.combine(y, given, plan.rows, plan.ends)
            assert not wanted.isnan().any()
            assert_close("out", rows_triton.combine(y, given, plan.rows, plan.ends), wanted, TOLERANCES[torch.float32])
        for part in plan.parts(2):
            start = randn(num_tokens, width + 1, seed=6)
            wanted, found = start.clone(), start.clone()
            rows.combine(y, weights, part.rows, part.ends, wanted)
            assert rows_triton.combine(y, weights, part.rows, part.ends, found) is found
            assert_close("sum", found, wanted, TOLERANCES[torch.float32])
    parts = randn(4, num_tokens, width)
    assert_close("sum of parts", rows_triton.sum_parts(parts), parts.sum(0), TOLERANCES[torch.float32])


@pytest.mark.parametrize(
    ("gate", "max_block"), [*((gate, 16) for gate in GATES), (CLAMPED, 2048)], ids=["silu", "gelu", "clamped", "whole"]
)
@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize(("counts", "width"), [([3, 0, 7, 1, 0], 13), ([0, 9], 32), ([5], 35)])
def test_activations_of_experts(monkeypatch, counts, width, gate, has_biases, max_block):
    # Catches swapped gate and up, gradients past the limit, the bias of another expert, and padding, which is NaN here.
    monkeypatch.setattr(rows_triton, "MAX_BLOCK", max_block)
    num_read, ends = sum(counts), torch.tensor(counts).cumsum(0).to(torch.int32)
    grad, up = (randn(num_read + 3, columns, seed=columns) for columns in (width, 2 * width))
    for values in (grad, up):
        values[num_read:] = float("nan")
    biases = randn(len(counts), 2 * width, seed=7) if has_biases else None
    weights, choices = randn(num_read + 3, 1, seed=5), torch.randperm(num_read + 3).to(torch.int32)
    of_weights = [torch.full_like(weights, torch.nan) for _ in range(2)]
    with nan_poisoned_empty():
        gated = rows_triton.gated(up, ends, gate, biases)[:num_read]
        assert_close("gated", gated, rows.gated(up, ends, gate, biases)[:num_read], TOLERANCES[torch.float32])
        wanted = rows.gated_backward(grad, up, weights, choices, ends, of_weights[0], gate, biases)
        found = rows_triton.gated_backward(grad, up, weights, choices, ends, of_weights[1], gate, biases)
    for name, mine, theirs in zip(("grad_up", "weighted"), found, wanted, strict=True):
        assert_close(name, mine[:num_read], theirs[:num_read], TOLERANCES[torch.float32])
    assert_close("grad_weights", of_weights[1], of_weights[0], TOLERANCES[torch.float32])


@pytest.mark.parametrize(("dtype", "gathers"), [(torch.float32, True), (torch.float16, False)], ids=str)
@pytest.mark.parametrize(
    ("counts", "depth", "width"), [([3, 0, 20, 1, 0], 9, 13), ([0, 40], 32, 32), ([17], 5, 35), ([0, 0, 0], 4, 4)]
)
def test_products_of_experts(monkeypatch, counts, depth, width, dtype, gathers):
    # Catches a last block that reads or writes the next expert's rows, an expert without rows, a gate that is taken for
    # up, rows that are gathered from the wrong operand, and padding, which is NaN here.
    monkeypatch.setattr(products_triton, "BLOCK_ROWS", 16)
    monkeypatch.setattr(products_triton, "BLOCK_COLUMNS", 32)
    monkeypatch.setattr(products_triton, "OUTER_BLOCK", 16)
    monkeypatch.setattr(products_triton, "DEPTH_BYTES", 16 * dtype.itemsize)
    num_rows, num_padding = sum(counts), 3
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    nan = torch.full((num_padding, 1), float("nan"), dtype=dtype)
    index = torch.randperm(num_rows + num_padding, generator=torch.Generator().manual_seed(3)).to(torch.int32)

    def operands(values):
        """The rows for the kernel and for its twin."""
        if not gathers:
            return Rows(values), Rows(values)
        scattered = torch.empty_like(values)
        scattered[index.long()] = values
        return products_triton.gather(scattered, index), Rows(values)

    def padded(values):
        return torch.cat([values, nan.expand(-1, values.shape[1])])

    x, grad = padded(randn(num_rows, depth, dtype=dtype)), padded(randn(num_rows, width, dtype=dtype, seed=1))
    weight = randn(len(counts), 2 * width, depth, dtype=dtype, seed=2)
    (mine, theirs), (my_grad, their_grad) = operands(x), operands(grad)
    tolerance = TOLERANCES[dtype]
    with nan_poisoned_empty():
        layouts = weight.transpose(1, 2), weight.transpose(1, 2).contiguous()
        for stacked, kept in zip(layouts, ((True, False, True), (False, True, False)), strict=True):
            wanted = products_native.product(theirs, stacked, ends)[:num_rows]
            assert_close("product", products_triton.product(mine, stacked, ends)[:num_rows], wanted, tolerance)
            total = padded(randn(num_rows, 2 * width, dtype=dtype, seed=3))
            sums = total[:num_rows] + wanted
            products_triton.add_product(total, mine, stacked, ends)
            assert_close("sum", total[:num_rows], sums, tolerance)
            added = randn(len(counts), 2 * width, dtype=dtype, seed=4)
            gates = (SILU, None), (GELU_TANH, None), (CLAMPED, added)
            for keep_up, options in zip(kept, gates, strict=True):
                found = products_triton.gated(mine, stacked, ends, *options, keep_up=keep_up)
                up, gated = products_native.gated(theirs, stacked, ends, *options, keep_up=True)
                assert_close("gated", found[1][:num_rows], gated[:num_rows], tolerance)
                assert_close("up", found[0][:num_rows], up[:num_rows] if keep_up else found[0], tolerance)
        wanted = products_native.outer(their_grad, theirs, ends)
        assert_close("outer", products_triton.outer(my_grad, mine, ends), wanted, tolerance)
        assert_close("outer", products_triton.outer(Rows(grad), mine, ends), wanted, tolerance)
        total = torch.ones_like(wanted)
        products_triton.add_outer(total, my_grad, mine, ends)
        assert_close("sum of outer", total, wanted + 1, tolerance)


@pytest.mark.parametrize(("num_tokens", "num_experts", "num_active"), [(5, 8, 3), (70, 60, 6), (1, 3, 3)])
def test_the_best_experts(num_tokens, num_experts, num_active):
    # Catches an expert that is chosen twice, ties that the first expert does not win, and ids out of range.
    scores = randn(num_tokens, num_experts).mul(4).round()
    assert torch.equal(routing_triton.top_experts(scores, num_active), top_experts(scores, num_active))
    ids = routing_triton.top_experts(torch.full_like(scores, float("nan")), num_active)
    assert int(ids.min()) >= 0
    assert int(ids.max()) < num_experts


def assert_equal_sums(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


# Documents shorter than a block, of whole blocks, without tokens, and over several blocks.
@pytest.mark.parametrize(
    ("lengths", "num_padding"),
    [
        ([1], None),
        ([1], 1),
        ([5, 0, 7], 1),
        *itertools.product([[64, 64], [128, 70, 0, 250]], [None, 66]),
        ([3, 200, 1], 1),
        ([4300], 66),  # slow: more blocks than a program adds up at once
    ],
)
@pytest.mark.parametrize(("num_experts", "num_active"), [(7, 3), (40, 2)])
def test_sums_of_routing(lengths, num_experts, num_active, num_padding):
    # Catches tokens of a neighbouring document at a boundary of blocks, padding that is counted, and values that are
    # not finite in the sums of a document.
    num_tokens = sum(lengths)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    logits = randn(num_tokens, num_experts)
    logits[num_tokens // 2, 1] = float("nan")
    logits[num_tokens // 3, 0] = float("inf")
    probabilities, ids = logits.softmax(-1), top_experts(logits, num_active)
    num_real = None if num_padding is None else torch.tensor(max(num_tokens - num_padding, 0))
    given = logits, probabilities, ids, cu_seqlens, num_real
    assert_equal_sums(routing_triton.sum_routing(*given), _sum_routing(*given))
    lse = logits.logsumexp(-1) * (torch.arange(num_tokens) < (num_tokens if num_real is None else num_real))
    grads = randn(len(lengths), num_experts), randn(len(lengths))
    given = *grads, probabilities, lse, cu_seqlens, num_real
    assert_equal_sums(routing_triton.sum_routing_backward(*given), _sum_routing_backward(*given))


def test_groups_without_rows_are_cleared(monkeypatch):
    # Catches a group with rows that is cleared, and a last block that reaches into the next group.
    monkeypatch.setattr(grouped_triton, "BLOCK", 16)
    out = torch.full((5, 3, 7), float("nan"))
    grouped_triton.clear_empty_groups_(out, torch.tensor([0, 4, 4, 9, 9], dtype=torch.int32))
    assert [bool(group.isnan().all()) for group in out] == [False, True, False, True, False]
    assert not out[[0, 2, 4]].any()


@pytest.mark.parametrize("lengths", [[70, 1, 129], [64], [3]])
@pytest.mark.parametrize(("num_key_heads", "key_dim", "value_dim"), [(2, 16, 24), (1, 80, 48)])
def test_chunk_gradients(num_key_heads, key_dim, value_dim, lengths):
    # Catches channels beyond a block, a chunk that is not full, a neighbouring document's, heads of other keys, and a
    # part of the decays' gradient.
    num_tokens, num_heads, scale = sum(lengths), 4, 0.3
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    chunks = [(document, index) for document, length in enumerate(lengths) for index in range(-(-length // 64))]
    q, k = (randn(num_tokens, num_key_heads, key_dim, seed=seed).requires_grad_() for seed in (0, 1))
    u, grad_out, grad_u = (randn(num_tokens, num_heads, value_dim, seed=seed) for seed in (2, 3, 4))
    states, grad_states = (randn(len(chunks), num_heads, key_dim, value_dim, seed=seed) for seed in (5, 6))
    steps = -randn(num_tokens, num_heads, seed=7).abs()
    g, total, wanted_w = [], torch.zeros(()), torch.empty(num_tokens, num_heads, key_dim)
    for chunk, (document, index) in enumerate(chunks):
        first = int(starts[document]) + 64 * index
        rows = slice(first, min(first + 64, int(starts[document + 1])))
        sums = steps[rows].cumsum(0).requires_grad_()  # [L, H], logarithms of the decays from the first token on
        g.append(sums)
        ratio = num_heads // num_key_heads
        qs, ks = (x[rows].repeat_interleave(ratio, 1).transpose(0, 1) for x in (q, k))
        decays, us = sums.t()[..., None], u[rows].transpose(0, 1)
        between = (decays - decays.transpose(1, 2)).tril().exp().tril()
        out = decays.exp() * (qs @ states[chunk]) + ((qs @ ks.transpose(1, 2)) * between) @ us
        after = decays[:, -1:].exp() * states[chunk] + (ks * (decays[:, -1:] - decays).exp()).transpose(1, 2) @ us
        total = total + (scale * out * grad_out[rows].transpose(0, 1)).sum() + (after * grad_states[chunk]).sum()
        wanted_w[rows] = -(grad_u[rows].transpose(0, 1) @ states[chunk].transpose(1, 2)).transpose(0, 1)
    total.backward()
    binary = torch.cat([sums.detach() for sums in g]) / torch.log(torch.tensor(2.0))
    with nan_poisoned_empty():
        found = delta_triton.chunk_gradients(
            q.detach(),
            k.detach(),
            u,
            grad_out,
            grad_u,
            binary,
            states,
            grad_states,
            starts,
            torch.tensor(chunks),
            scale,
        )
    wanted = q.grad, k.grad, wanted_w, torch.cat([sums.grad for sums in g])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))
