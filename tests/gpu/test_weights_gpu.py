"""Quantised weights on a GPU: kernels that do what their plain twins do, to the bit."""

from __future__ import annotations

import pytest
import torch

from xorl.kernels.quant import (
    WeightNoise,
    dequantize_block_fp8,
    dequantize_nf4,
    dequantize_nvfp4,
    nvfp4_global_scale,
    quant_refusal,
    quantize_block_fp8,
    quantize_nf4,
    quantize_nvfp4,
)
from xorl.kernels.testing import nan_poisoned_empty

CUDA = torch.device("cuda")
REFUSAL = "torch finds no CUDA GPU here" if not torch.cuda.is_available() else quant_refusal("nvfp4", CUDA)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 64), (130, 320), (1000, 4096), (4096, 12288)]


def matrix(shape, dtype, seed=0):
    """Numbers over several powers of two, with zeros, a block of zeros and one far smaller than the others."""
    generator = torch.Generator().manual_seed(seed)
    normal, spread = torch.randn(2, *shape, generator=generator)
    x = normal * spread.exp()
    x[0, :4] = 0.0
    if shape[0] > 2:
        x[1, :64] = 0.0
        x[2, :64] *= 1e-6
    return x.to(dtype)


def assert_bitwise(got, wanted):
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert torch.equal(one.cpu().flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def noise(device):
    return WeightNoise(0.5, torch.tensor([12345, 7], device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nf4_as_its_twin_to_the_bit(shape, dtype):
    # Catches divisions that approximate, flushed subnormal numbers and rounding to bf16 that is not to nearest even.
    x = matrix(shape, dtype)
    codes, absmax = quantize_nf4(x, 64)
    with nan_poisoned_empty():
        assert_bitwise(quantize_nf4(x.cuda(), 64), (codes, absmax))
        for out in DTYPES:
            assert_bitwise([dequantize_nf4(codes.cuda(), absmax.cuda(), out)], [dequantize_nf4(codes, absmax, out)])
        noisy = dequantize_nf4(codes.cuda(), absmax.cuda(), torch.float32, noise("cuda")).cpu()
    wanted = dequantize_nf4(codes, absmax, torch.float32, noise("cpu"))
    torch.testing.assert_close(noisy, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nvfp4_as_its_twin_to_the_bit(shape, dtype):
    # Catches ties of codes or of block scales that do not go to even, and scales converted otherwise than torch does.
    x = matrix(shape, dtype)
    scale = nvfp4_global_scale(x.abs().amax()).repeat(shape[0])
    scale[: shape[0] // 2] *= 3
    codes, scales = quantize_nvfp4(x, scale, 16)
    on_gpu = (codes.cuda(), scales.cuda(), scale.cuda())
    with nan_poisoned_empty():
        assert_bitwise(quantize_nvfp4(x.cuda(), scale.cuda(), 16), (codes, scales))
        for out in DTYPES:
            assert torch.equal(dequantize_nvfp4(*on_gpu, out).cpu(), dequantize_nvfp4(codes, scales, scale, out))
        noisy = dequantize_nvfp4(*on_gpu, torch.float32, noise("cuda")).cpu()
    wanted = dequantize_nvfp4(codes, scales, scale, torch.float32, noise("cpu"))
    torch.testing.assert_close(noisy, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (257, 130)], ids=str)
def test_block_fp8_as_its_twin_to_the_bit(shape, dtype):
    # Catches blocks cut off at the border, subnormal codes and a scale of the neighbouring block.
    x = matrix(shape, dtype)
    codes, scales = quantize_block_fp8(x, 128)
    with nan_poisoned_empty():
        assert_bitwise(quantize_block_fp8(x.cuda(), 128), (codes, scales))
        for out in DTYPES:
            got = dequantize_block_fp8(codes.cuda(), scales.cuda(), 128, out)
            assert_bitwise([got], [dequantize_block_fp8(codes, scales, 128, out)])
        noisy = dequantize_block_fp8(codes.cuda(), scales.cuda(), 128, torch.float32, noise("cuda")).cpu()
    wanted = dequantize_block_fp8(codes, scales, 128, torch.float32, noise("cpu"))
    torch.testing.assert_close(noisy, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(value):
    # Catches an infinity that becomes the largest number of the format, after which training goes on.
    x = matrix((4, 128), torch.float32).cuda()
    x[3, 9] = value
    scale = torch.ones(4, device="cuda")
    assert not dequantize_nvfp4(*quantize_nvfp4(x, scale, 16), scale, torch.float32)[3, 9].isfinite()
    assert not dequantize_nf4(*quantize_nf4(x, 64), torch.float32)[3, 9].isfinite()
    assert not dequantize_block_fp8(*quantize_block_fp8(x, 128), 128, torch.float32)[3, 9].isfinite()


def test_more_than_two_to_the_31_weights():
    # Catches offsets that overflow 32 bits.
    x = torch.randn(36000, 61440, device="cuda", dtype=torch.bfloat16)
    tail = x[-8:].clone()
    codes, absmax = quantize_nf4(x, 64)
    assert_bitwise([codes[-8:], absmax[-8:]], [part.cpu() for part in quantize_nf4(tail, 64)])
    last = dequantize_nf4(codes, absmax, torch.bfloat16)[-8:]
    assert_bitwise([last], [dequantize_nf4(codes[-8:], absmax[-8:], torch.bfloat16).cpu()])
