"""Quantised weights on a GPU: kernels that do what their plain twins do, layers over them, and runs of `xorl train`."""

import pytest
import torch

from xorl.core.nn import Linear
from xorl.kernels.quant import GROUP_SIZES, QuantScheme, WeightNoise, quant_refusal
from xorl.kernels.quant.block_fp8 import dequantize_block_fp8, quantize_block_fp8
from xorl.kernels.quant.nf4 import dequantize_nf4, quantize_nf4
from xorl.kernels.quant.nvfp4 import dequantize_nvfp4, nvfp4_global_scale, quantize_nvfp4
from xorl.kernels.testing import nan_poisoned_empty
from xorl.lora.quantized import QuantizedLinear, write_rows_

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
    return WeightNoise(0.5, torch.tensor([12345, 7, 0], device=device))


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


QLORA = ["--lora.enable_qlora", "true", "--lora.lora_rank", "8", "--train.lr", "1e-2"]


@pytest.mark.parametrize("compiled", ["true", "false"])
@pytest.mark.parametrize("quant_format", ["nf4", "nvfp4", "block_fp8"])
def test_training_follows_adapters_on_the_base_itself(quant_format: str, compiled: str, train) -> None:
    # Catches quantised layers that break a graph, keep what was dequantised, or pass on another gradient.
    compile_option = ["--train.enable_compile", compiled]
    plain = train(f"lora_{compiled}", "--lora.enable_lora", "true", *QLORA[2:], *compile_option)
    losses = train(f"{quant_format}_{compiled}", *QLORA, "--lora.quant_format", quant_format, *compile_option)
    assert losses == pytest.approx(plain, rel=3e-2)
    assert losses != plain


@pytest.mark.parametrize("quant_format", ["nf4", "nvfp4", "block_fp8"])
def test_resumed_run_with_noise_and_merges_is_the_same_to_the_bit(quant_format: str, resumed_alike) -> None:
    # Catches noise that depends on more than the step, and a base that a checkpoint does not hold.
    more = ["--lora.quant_format", quant_format, "--lora.enable_aqn", "true", "--lora.merge_lora_interval", "3"]
    resumed_alike(quant_format, *QLORA, *more)


@pytest.mark.parametrize("quant_format", ["nf4", "nvfp4", "block_fp8"])
@pytest.mark.parametrize("compiled", ["true", "false"])
def test_two_gpus_agree_with_one(quant_format: str, compiled: str, train, two_gpus) -> None:
    # Catches bytes that NCCL or FSDP2's mixed precision changes, and graphs that keep gathered memory.
    options = [*QLORA, "--lora.quant_format", quant_format, "--train.enable_compile", compiled]
    options += ["--train.data_parallel_mode", "fsdp2"]
    name = f"{quant_format}_{compiled}"
    one = train(f"{name}_one", *options, "--train.gradient_accumulation_steps", "4")
    assert train(f"{name}_two", *options, gpus=2) == pytest.approx(one, rel=2e-2)


@pytest.mark.parametrize("quant_format", ["nf4", "nvfp4", "block_fp8"])
def test_a_layer_keeps_no_weight_for_the_backward_pass(quant_format: str) -> None:
    # Catches a dequantised weight, or a copy of the codes, that a compiled layer keeps between its passes.
    scheme = QuantScheme(quant_format, GROUP_SIZES[quant_format])
    plain = Linear(4096, 8192, bias=False).cuda().requires_grad_(False)
    with torch.no_grad():
        plain.weight.normal_(std=0.02)
    layer = QuantizedLinear(plain, scheme)
    write_rows_(layer, plain.weight.detach())
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for forward in (layer.forward, torch.compile(layer.forward, fullgraph=True)):
        forward(x).sum().backward()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = forward(x)
        assert torch.cuda.memory_allocated() - before <= 2 * y.numel() * y.element_size() + x.numel() * 2 + (1 << 20)
        y.sum().backward()
    weight = layer.dense_weight(torch.bfloat16)
    grad = torch.ones(16, 8192, device="cuda", dtype=torch.bfloat16)
    x.grad = None
    layer(x).backward(grad)
    assert torch.equal(x.grad, grad @ weight)


def test_block_fp8_takes_the_rows_of_all_experts_of_a_layer():
    # Catches rows on an axis of the grid that takes 65,535 programs: 256 experts of 4,096 rows are more.
    weight = torch.randn(256 * 4096 + 160, 128, device="cuda", dtype=torch.bfloat16)
    codes, scales = quantize_block_fp8(weight, 16)
    found = dequantize_block_fp8(codes, scales, 16, torch.bfloat16)
    assert (found.float() - weight.float()).norm() < 0.03 * weight.float().norm()
    tail = quantize_block_fp8(weight[-160:], 16)
    assert torch.equal(codes[-160:].view(torch.uint8), tail[0].view(torch.uint8))
    assert torch.equal(scales[-10:], tail[1])
