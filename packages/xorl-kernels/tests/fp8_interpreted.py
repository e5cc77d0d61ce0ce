"""Casts to fp8, and products of experts in it, against their plain twins in Triton's interpreter.

test_kernels_fused.py runs this file. The interpreter of Triton 3.6 rounds to fp8 wrongly (it loses the carry into the
exponent), so all values here are ones that fp8 has; rounding is left to tests/gpu.
"""

import pytest
import torch

from xorl.kernels.experts import products_fp8, products_triton
from xorl.kernels.experts.gates import SILU
from xorl.kernels.experts.products import Rows
from xorl.kernels.quant import fp8, fp8_triton
from xorl.kernels.quant.fp8 import E4M3, E5M2
from xorl.kernels.testing import nan_poisoned_empty

SHAPES = [(1, 1), (32, 48), (66, 129)]
DTYPES = [torch.float32, torch.bfloat16]


def matrix(shape, dtype, seed=0):
    """Numbers of three significant bits within seven powers of two, and a row and a column of zeros."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-3, 4, shape, generator=generator).float()
    x = torch.randint(-7, 8, shape, generator=generator) * exponents.exp2() / 64
    if shape[0] > 16:
        x[3], x[:, 5] = 0.0, 0.0
    return x.to(dtype)


def assert_equal(got, wanted):
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_casts(monkeypatch, shape, dtype, fp8_dtype):
    # Catches a wrong border of a tile, scales of the wrong axis, padding that is not zero and a tile not transposed.
    monkeypatch.setattr(fp8_triton, "BLOCK", 2048)
    monkeypatch.setattr(fp8_triton, "TILE_R", 64)
    monkeypatch.setattr(fp8_triton, "TILE_C", 64)
    x = matrix(shape, dtype)
    with nan_poisoned_empty():
        amax = fp8_triton.amax(x)
        assert_equal([amax], [fp8.amax(x)])
        both = fp8_triton.cast_tensorwise_both(x, amax, fp8_dtype)
        assert_equal(both, fp8.cast_tensorwise_both(x, amax, fp8_dtype))
        assert_equal(fp8_triton.cast_rowwise(x, fp8_dtype), fp8.cast_rowwise(x, fp8_dtype))
        assert_equal(fp8_triton.cast_columnwise(x, fp8_dtype), fp8.cast_columnwise(x, fp8_dtype))
        assert_equal(fp8_triton.cast_axiswise(x, fp8_dtype), fp8.cast_axiswise(x, fp8_dtype))
        q, descale = torch.empty_like(both[0]), torch.empty(())
        fp8_triton.cast_into_(x, amax, q, descale)
        assert_equal([q, descale], [both[0], both[2]])
        assert_equal([fp8_triton.transpose(q)], [fp8.transpose(q)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 20, 48), (2, 130, 69)], ids=str)
def test_casts_of_stacks(monkeypatch, shape, dtype):
    # Catches scales of another matrix, rows of the next tile in a scale, and rows that are read in several blocks.
    monkeypatch.setattr(fp8_triton, "ROW_BLOCK", 16)
    x = torch.stack([matrix(shape[1:], dtype, seed) for seed in range(shape[0])])
    with nan_poisoned_empty():
        assert_equal(fp8_triton.cast_stack_columnwise(x, E4M3), fp8.cast_stack_columnwise(x, E4M3))
        rows = x.flatten(0, 1)[-20:]
        assert_equal(fp8_triton.cast_rowwise(rows, E4M3), fp8.cast_rowwise(rows, E4M3))


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("is_forward", [True, False])
@pytest.mark.parametrize(("counts", "depth", "width"), [([3, 0, 20, 1, 0], 9, 13), ([0, 40], 33, 35), ([0, 0], 4, 4)])
def test_products_of_experts(monkeypatch, counts, depth, width, is_forward, gathers):
    # Catches a scale of another row, another expert or another half, and a result that has the operands' dtype.
    monkeypatch.setattr(products_triton, "BLOCK_ROWS", 16)
    monkeypatch.setattr(products_triton, "BLOCK_COLUMNS", 32)
    monkeypatch.setattr(products_triton, "DEPTH_BYTES", 32)
    num_rows = sum(counts)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    index = torch.randperm(num_rows + 2, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    values = matrix((num_rows + 2, depth), torch.float32) * 2.0 ** -torch.arange(num_rows + 2)[:, None].remainder(5)
    weight = torch.stack([matrix((2 * width, depth), torch.float32, seed) * 4.0**-seed for seed in range(len(counts))])
    weight = weight.transpose(1, 2) if is_forward else weight.transpose(1, 2).contiguous()
    wanted_up, wanted = products_fp8.gated(Rows(values[index]), weight, ends, SILU, None, keep_up=True)
    given = Rows(values, index) if gathers else Rows(values[index])
    monkeypatch.setattr(products_fp8, "_is_plain", lambda _: False)
    with nan_poisoned_empty():
        product = products_fp8.product(given, weight, ends)
        up, gated = products_fp8.gated(given, weight, ends, SILU, None, keep_up=True)
    for mine, theirs in ((product, wanted_up), (up, wanted_up), (gated, wanted)):
        torch.testing.assert_close(mine[:num_rows], theirs[:num_rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(value):
    # Catches an infinity that saturates to a large number, after which training goes on.
    x = matrix((32, 32), torch.float32)
    x[7, 9] = value
    q, q_t, descale = fp8_triton.cast_tensorwise_both(x, fp8_triton.amax(x), E4M3)
    assert descale.isnan() or (q[7].float().isnan().any() and q_t[9].float().isnan().any())


def test_a_matrix_with_strides_is_read_as_it_is():
    # Catches a view, such as a slice of fused projections or a broadcast gradient, that is read as if contiguous.
    wide = matrix((48, 96), torch.float32)
    for x in (wide[:, 16:48], wide.t(), wide[:1].expand(48, 96)):
        amax = fp8_triton.amax(x)
        got = fp8_triton.cast_tensorwise_both(x, amax, E4M3)
        assert_equal(got, fp8.cast_tensorwise_both(x.contiguous(), amax, E4M3))
        assert_equal(fp8_triton.cast_axiswise(x, E4M3), fp8.cast_axiswise(x.contiguous(), E4M3))
