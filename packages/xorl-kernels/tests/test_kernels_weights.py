"""Formats of quantised weights: error bounds against fp64, ties, borders, noise, and kernels that do what twins do."""

import importlib.util
import math
import subprocess
import sys

import pytest
import torch

from xorl.kernels.quant import WeightNoise, formats, nf4, quant_refusal
from xorl.kernels.quant.block_fp8 import dequantize_block_fp8, quantize_block_fp8
from xorl.kernels.quant.nf4 import dequantize_nf4, quantize_nf4
from xorl.kernels.quant.noise import held_pairs, normal_pairs
from xorl.kernels.quant.nvfp4 import dequantize_nvfp4, nvfp4_global_scale, quantize_nvfp4

CPU = torch.device("cpu")


def matrix(num_rows, num_columns, dtype=torch.bfloat16, seed=0):
    """Numbers over many powers of two, as the weights of no layer are."""
    generator = torch.Generator().manual_seed(seed)
    normal, spread = torch.randn(2, num_rows, num_columns, generator=generator)
    return (normal * (2 * spread).exp()).to(dtype)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform")
def test_the_kernels_compile_for_hopper():
    # Catches what the interpreter lets pass and a GPU's compiler does not, and stores of single elements.
    program = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from xorl.kernels.quant import blocks_triton

def show(name, types, values, num_warps):
    kernel = getattr(blocks_triton, name)
    signature = dict(zip(kernel.arg_names, types + ["constexpr"] * len(values), strict=True))
    constants = {(len(types) + index,): value for index, value in enumerate(values)}
    attributes = {(index,): [["tt.divisibility", 16]] for index, kind in enumerate(types) if kind != "fp32"}
    source = ASTSource(kernel, signature, constants, attributes)
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}).asm["ptx"]
    print(name, "st.global.v4.b32" in ptx, "st.global.b16" in ptx)

draws = ["*i64", "fp32"]
for noise in (0, 3, 7):  # the length of its state
    show("_dequantize_nf4", ["*u8", "*fp32", "*fp32", "*bf16", "i32", *draws], [noise, 64, 32], 8)
    show("_dequantize_nvfp4", ["*u8", "*fp8e4nv", "*fp32", "*bf16", "i32", "i32", *draws], [noise, 256, 8], 8)
    show("_dequantize_block_fp8", ["*fp8e4nv", "*fp32", "*bf16", "i32", "i32", *draws], [noise, 128, 16], 4)
show("_quantize_nf4", ["*bf16", "*u8", "*fp32", "*fp32", "i32"], [64, 32], 8)
show("_quantize_nvfp4", ["*bf16", "*fp32", "*u8", "*fp8e4nv", "i32", "i32"], [256, 8], 8)
show("_quantize_block_fp8", ["*bf16", "*fp8e4nv", "*fp32", "i32", "i32"], [128], 8)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    lines = [line.split() for line in result.stdout.splitlines()]
    assert len(lines) == 12
    for name, is_wide, is_narrow in lines:
        if name.startswith("_dequantize"):
            assert (is_wide, is_narrow) == ("True", "False"), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("group_size", [32, 64, 256])
def test_nf4_is_within_its_stated_error(group_size, dtype):
    # Catches a wrong table, scales of the neighbouring group and codes that are not those of the nearest value.
    x = matrix(48, 512, dtype)
    codes, absmax = quantize_nf4(x, group_size)
    assert (codes.shape, absmax.shape) == ((48, 256), (48, 512 // group_size))
    wide = x.double()
    assert torch.equal(absmax.double(), wide.unflatten(1, (-1, group_size)).abs().amax(-1))
    back = dequantize_nf4(codes, absmax, torch.float32).double()
    by_element = absmax.double().repeat_interleave(group_size, 1)
    distances = wide[..., None] / by_element[..., None] - torch.tensor(formats.NF4_VALUES).double()
    nearest = distances.abs().amin(-1) * by_element
    assert bool(((back - wide).abs() <= nearest + 1e-6 * by_element).all())
    assert bool(((back - wide).abs() <= (nf4.MAX_ERROR + 1e-6) * by_element).all())


def test_nf4_packs_the_earlier_weight_above_and_keeps_zeros():
    # Catches nibbles in the other order than bitsandbytes', and zeros that become something else.
    x = torch.tensor([[1.0, -1.0] + [0.0] * 30])
    codes, absmax = quantize_nf4(x, 32)
    assert codes[0, 0].item() == 0xF0
    assert torch.equal(dequantize_nf4(codes, absmax, torch.float32), x)
    nothing = torch.zeros(2, 32)
    assert torch.equal(dequantize_nf4(*quantize_nf4(nothing, 32), torch.bfloat16), nothing.bfloat16())


def test_nvfp4_rounds_ties_to_even_and_saturates():
    # Catches E2M1 codes that differ from those of other writers, and the earlier weight in the upper four bits.
    # The largest is not quite representable: the block's scale, 6.2 / 6, is rounded down to one.
    x = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.2, -0.3, -0.8, 6.0, 0.2, -5.1, 4.9, 2.6, 0.0]])
    codes, scales = quantize_nvfp4(x, torch.ones(1), 16)
    assert scales.float().item() == 1.0
    wanted = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.5, -1.0, 6.0, 0.0, -6.0, 4.0, 3.0, 0.0]
    assert dequantize_nvfp4(codes, scales, torch.ones(1), torch.float32).tolist() == [wanted]
    assert codes[0, 0].item() == 0x20, "0.0, then 1.0"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("group_size", [16, 32])
def test_nvfp4_is_within_its_stated_error(group_size, dtype):
    # Catches scales that are inverted, a global scale taken twice, and blocks that lose their largest values.
    x = matrix(48, 512, dtype) * 1e-3
    wide = x.double()
    global_scale = nvfp4_global_scale(x.abs().amax()).expand(48)
    codes, scales = quantize_nvfp4(x, global_scale, group_size)
    assert (codes.shape, scales.shape) == ((48, 256), (48, 512 // group_size))
    assert scales.float().max().item() == formats.E4M3_LARGEST
    back = dequantize_nvfp4(codes, scales, global_scale, torch.float32).double()
    step = scales.double().repeat_interleave(group_size, 1) * global_scale[0].double()
    spacing = torch.where(wide.abs() <= 2 * step, 0.25, torch.where(wide.abs() <= 4 * step, 0.5, 1.0)) * step
    clipped = (wide.abs() - formats.E2M1_LARGEST * step).clamp(min=0)
    assert bool(((back - wide).abs() <= torch.maximum(spacing, clipped) * (1 + 1e-6)).all())
    # What is clipped at most, where the scale is a normal number of E4M3: it was rounded down by one part in 17.
    normal = step >= 2.0**-6 * global_scale[0].double()
    assert bool((clipped <= formats.E2M1_LARGEST / 16 * step * (1 + 1e-6))[normal].all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("shape", "group_size"), [((128, 256), 128), ((130, 257), 128), ((40, 72), 32)])
def test_block_fp8_is_within_its_stated_error(shape, group_size, dtype):
    # Catches blocks that are cut off at a border with another's scale, and a scale stored as its inverse.
    x = matrix(*shape, dtype)
    codes, scales = quantize_block_fp8(x, group_size)
    assert scales.shape == (math.ceil(shape[0] / group_size), math.ceil(shape[1] / group_size))
    assert codes.float().abs().max().item() == formats.E4M3_LARGEST
    wide, back = x.double(), dequantize_block_fp8(codes, scales, group_size, torch.float32).double()
    by_row = scales.double().repeat_interleave(group_size, 0)[: shape[0]]
    step = by_row.repeat_interleave(group_size, 1)[:, : shape[1]]
    bound = torch.maximum(wide.abs() / 16, step * 2.0**-10)
    assert bool(((back - wide).abs() <= bound * (1 + 1e-6)).all())


def test_matrices_of_zeros_stay_zeros():
    # Catches NaN from dividing by a largest value of zero.
    zeros = torch.zeros(4, 128)
    scale = nvfp4_global_scale(zeros.abs().amax()).expand(4)
    assert not dequantize_nvfp4(*quantize_nvfp4(zeros, scale, 16), scale, torch.float32).any()
    assert not dequantize_block_fp8(*quantize_block_fp8(zeros, 128), 128, torch.float32).any()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(value):
    # Catches an infinity that becomes the largest number of the format, after which training goes on.
    x = matrix(4, 128, torch.float32)
    x[3, 9] = value
    scale = torch.ones(4)
    assert not dequantize_nvfp4(*quantize_nvfp4(x, scale, 16), scale, torch.float32)[3, 9].isfinite()
    assert not dequantize_nf4(*quantize_nf4(x, 64), torch.float32)[3, 9].isfinite()
    assert not dequantize_block_fp8(*quantize_block_fp8(x, 128), 128, torch.float32)[3, 9].isfinite()


def nf4_steps(x):
    codes, absmax = quantize_nf4(x, 64)
    return (codes, absmax), 0.5 * 0.0796 * absmax.repeat_interleave(64, 1)


def nvfp4_steps(x):
    global_scale = nvfp4_global_scale(x.abs().amax()).expand(len(x))
    codes, scales = quantize_nvfp4(x, global_scale, 16)
    return (codes, scales, global_scale), 0.5 * (scales.float() * global_scale[:, None]).repeat_interleave(16, 1)


def block_fp8_steps(x):
    codes, scales = quantize_block_fp8(x, 128)
    return (codes, scales, 128), 0.125 * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)


# What dequantises, and the function from a matrix to what is stored and half a quantisation step of each element.
NOISY = {
    "nf4": (dequantize_nf4, nf4_steps),
    "nvfp4": (dequantize_nvfp4, nvfp4_steps),
    "block_fp8": (dequantize_block_fp8, block_fp8_steps),
}


def test_noise_is_normal_half_a_step_large_and_a_function_of_seed_and_step():
    # Catches noise of another size, noise that repeats in the next step or layer, and noise that is not reproduced.
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    pairs = normal_pairs(WeightNoise(1.0, torch.tensor([3, 1, 0])), 1 << 16, CPU)
    for moment, wanted in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert (pairs.double() ** moment).mean().item() == pytest.approx(wanted, abs=0.06)
    for quant_format, (dequantise, half_step) in NOISY.items():
        stored, by_element = half_step(x)
        plain = dequantise(*stored, torch.float32)
        seen = []
        for key, step in ((3, 1), (3, 2), (4, 1), (3, 1)):
            noisy = dequantise(*stored, torch.float32, WeightNoise(0.5, torch.tensor([key, step, 0])))
            seen.append((noisy - plain) / (0.5 * by_element))
        assert torch.equal(seen[0], seen[3]), quant_format
        for index, noise in enumerate(seen[:3]):
            assert noise.std().item() == pytest.approx(1.0, abs=0.01), quant_format
            for other in seen[:index]:
                assert (noise * other).mean().item() == pytest.approx(0.0, abs=0.02)


def test_part_of_a_weight_has_the_noise_that_it_has_in_the_whole():
    # Catches noise of experts that depends on how many ranks share them.
    whole = normal_pairs(WeightNoise(1.0, torch.tensor([3, 1, 0])), 64, CPU)
    part = normal_pairs(WeightNoise(1.0, torch.tensor([3, 1, 24])), 40, CPU)
    assert torch.equal(part, whole[48:])


PARTS = [
    ([(3, 8)], None),
    ([(0, 8)], (6, 12)),
    ([(1, 2), (4, 4), (4, 6), (7, 8)], None),
    ([(2, 4), (6, 7)], (2, 8)),
    ([(8, 8)], None),
]


@pytest.mark.parametrize(("rows", "columns"), PARTS)
def test_rows_and_columns_of_a_weight_have_the_noise_that_they_have_in_the_whole(rows, columns):
    # Catches noise that follows a rank's own indices, and ranges of rows that repeat the noise of the first.
    whole = normal_pairs(WeightNoise(1.0, torch.tensor([3, 1, 0])), 8 * 6, CPU).view(8, 12)
    held = torch.cat([whole[start:stop] for start, stop in rows])[:, slice(*columns or (0, 12))]
    state = torch.tensor([3, 1, *held_pairs(12, rows, columns)])
    part = normal_pairs(WeightNoise(1.0, state), held.numel() // 2, CPU)
    assert torch.equal(part.view(held.shape), held)


def test_what_cannot_run_is_refused_by_name():
    # Catches a run on a device without kernels that fails in its first step, or worse computes on the CPU.
    assert quant_refusal("nvfp4", CPU) is None
    assert "CUDA" in str(quant_refusal("nf4", torch.device("mps")))
