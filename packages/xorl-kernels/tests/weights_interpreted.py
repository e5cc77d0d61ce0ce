"""Formats of quantised weights against their plain twins in Triton's interpreter; test_kernels_fused.py runs this.

The interpreter reads bf16 as it is but rounds to it wrongly: dequantised weights are compared in fp32 and fp16 here.
"""

import pytest
import torch

from xorl.kernels.quant import WeightNoise, block_fp8, blocks_triton, nf4, nvfp4
from xorl.kernels.testing import nan_poisoned_empty

# Fewer groups than a tile, and several tiles with a rest.
SHAPES = [(3, 64), (70, 192)]
OUT_DTYPES = [torch.float32, torch.float16]


def matrix(shape, dtype, seed=0):
    """Numbers over several powers of two, with zeros, a block of zeros and one far smaller than the others."""
    generator = torch.Generator().manual_seed(seed)
    normal, spread = torch.randn(2, *shape, generator=generator)
    x = normal * spread.exp()
    x[0, :4] = 0.0
    x[1, :64] = 0.0
    x[2, :64] *= 1e-6
    return x.to(dtype)


def assert_bitwise(got, wanted):
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


# Consecutive pairs of a weight, columns of it, and three ranges of its rows.
STATES = [[1000], [1000, 16, 40], [1000, 32, 32, 32, 2000, 64, 3000]]


def assert_as_noisy(dequantize, twin, *stored):
    for state in STATES:
        noise = WeightNoise(0.5, torch.tensor([12345, 7, *state]))
        with nan_poisoned_empty():
            noisy = dequantize(*stored, torch.float32, noise)
        torch.testing.assert_close(noisy, twin(*stored, torch.float32, noise), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("group_size", "dtype"), [(16, torch.float32), (64, torch.bfloat16)])
def test_nf4(shape, dtype, group_size):
    # Catches a wrong border of a tile, nibbles swapped, a bound that rounds the other way and noise of other elements.
    x = matrix(shape, dtype)
    codes, absmax = nf4.quantize_nf4(x, group_size)
    with nan_poisoned_empty():
        assert_bitwise(blocks_triton.quantize_nf4(x, group_size), (codes, absmax))
        for out_dtype in OUT_DTYPES:
            got = blocks_triton.dequantize_nf4(codes, absmax, out_dtype, None)
            assert_bitwise([got], [nf4.dequantize_nf4(codes, absmax, out_dtype)])
    assert_as_noisy(blocks_triton.dequantize_nf4, nf4.dequantize_nf4, codes, absmax)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("group_size", "dtype"), [(16, torch.float32), (32, torch.bfloat16)])
def test_nvfp4(shape, dtype, group_size):
    # Catches ties that do not go to even, block scales that are rounded otherwise, and a row's scale taken for another.
    x = matrix(shape, dtype)
    amax = x.abs().amax()
    global_scale = nvfp4.nvfp4_global_scale(amax).repeat(shape[0])
    global_scale[: shape[0] // 2] *= 3
    codes, scales = nvfp4.quantize_nvfp4(x, global_scale, group_size)
    with nan_poisoned_empty():
        assert_bitwise(blocks_triton.quantize_nvfp4(x, global_scale, group_size), (codes, scales))
        for out_dtype in OUT_DTYPES:
            got = blocks_triton.dequantize_nvfp4(codes, scales, global_scale, out_dtype, None)
            wanted = nvfp4.dequantize_nvfp4(codes, scales, global_scale, out_dtype)
            assert torch.equal(got, wanted)
    assert_as_noisy(blocks_triton.dequantize_nvfp4, nvfp4.dequantize_nvfp4, codes, scales, global_scale)


@pytest.mark.parametrize("shape", [(3, 64), (37, 161)], ids=str)
@pytest.mark.parametrize(("group_size", "dtype"), [(32, torch.float32), (128, torch.bfloat16)])
def test_block_fp8(shape, dtype, group_size):
    # Catches blocks that are cut off at the border, subnormal codes and scales of the neighbouring block.
    x = matrix(shape, dtype)
    codes, scales = block_fp8.quantize_block_fp8(x, group_size)
    with nan_poisoned_empty():
        assert_bitwise(blocks_triton.quantize_block_fp8(x, group_size), (codes, scales))
        for out_dtype in OUT_DTYPES:
            got = blocks_triton.dequantize_block_fp8(codes, scales, group_size, out_dtype, None)
            assert_bitwise([got], [block_fp8.dequantize_block_fp8(codes, scales, group_size, out_dtype)])
    assert_as_noisy(blocks_triton.dequantize_block_fp8, block_fp8.dequantize_block_fp8, codes, scales, group_size)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(value):
    # Catches an infinity that becomes the largest number of the format, after which training goes on. (nvfp4 has NaN
    # among its scales then, which the interpreter converts to zero.)
    x = matrix((4, 64), torch.float32)
    x[3, 9] = value
    back = blocks_triton.dequantize_nf4(*blocks_triton.quantize_nf4(x, 64), torch.float32, None)
    assert not back[3, 9].isfinite()
    back = blocks_triton.dequantize_block_fp8(*blocks_triton.quantize_block_fp8(x, 128), 128, torch.float32, None)
    assert not back[3, 9].isfinite()
