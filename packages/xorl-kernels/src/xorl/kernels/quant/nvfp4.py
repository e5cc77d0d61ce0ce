"""NVFP4: 4-bit E2M1 codes, an E4M3 scale for each 16 weights of a row, and one fp32 scale for the matrix.

A weight is code * scale * global scale. The global scale maps the largest block scale to the largest E4M3 number. Two
codes share a byte, the earlier weight in the lower four bits, as in checkpoints of NVIDIA's ModelOpt.

Error, with step = scale * global scale: at most a quarter of a step for weights up to two steps, half a step up to
four, and one step beyond. If a block's scale was rounded down, values above six steps are clipped, by at most a
seventeenth of the block's largest value if the scale is a normal E4M3 number. If a block's largest value is below
1/28672 of the matrix's, its scale is subnormal, and rounds to zero from half of the smallest subnormal number down.

Shapes: R rows, C columns, G group size.
"""

import torch
from torch import Tensor

from xorl.kernels.quant.device import blocks_triton
from xorl.kernels.quant.formats import E2M1_LARGEST, E2M1_VALUES, E4M3_LARGEST, NVFP4_NOISE_STEP, table
from xorl.kernels.quant.noise import WeightNoise, normal_pairs

# Midpoints between neighbouring magnitudes: those in ROUND_DOWN round down, those in ROUND_UP round up (ties to even).
ROUND_DOWN = (0.25, 1.25, 2.5, 5.0)
ROUND_UP = (0.75, 1.75, 3.5)


def nvfp4_global_scale(amax: Tensor) -> Tensor:
    """The global scale, fp32 [], of a matrix with the largest absolute value `amax` []; 1 for a matrix of zeros."""
    scale = amax.float() / (E2M1_LARGEST * E4M3_LARGEST)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def quantize_nvfp4(weight: Tensor, global_scale: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """weight [R, C] and global scales fp32 [R] -> (codes uint8 [R, C / 2], block scales E4M3 [R, C / G]).

    G must divide C. There is a global scale per row because several matrices may be stacked into one.
    """
    if weight.is_cuda:
        return blocks_triton().quantize_nvfp4(weight, global_scale, group_size)
    groups = weight.float().unflatten(1, (-1, group_size))  # [R, C / G, G]
    global_scales = global_scale[:, None]
    absmax = groups.abs().amax(dim=-1)
    scales = (absmax / E2M1_LARGEST / global_scales).clamp(max=E4M3_LARGEST)
    scales = torch.where(absmax.isfinite(), scales, torch.nan).to(torch.float8_e4m3fn)
    step = (scales.float() * global_scales)[..., None]
    scaled = torch.where(step == 0, 0.0, groups / step)
    magnitude = scaled.abs()
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for midpoint in ROUND_DOWN:
        codes += magnitude > midpoint
    for midpoint in ROUND_UP:
        codes += magnitude >= midpoint
    codes = (codes | (scaled < 0).to(torch.uint8) << 3).flatten(1)
    return codes[:, 1::2] << 4 | codes[:, ::2], scales


def dequantize_nvfp4(
    codes: Tensor, scales: Tensor, global_scale: Tensor, dtype: torch.dtype, noise: WeightNoise | None = None
) -> Tensor:
    """[R, C] in `dtype`: code * (scale * global scale), plus noise, computed in fp32 and rounded once."""
    if codes.is_cuda:
        return blocks_triton().dequantize_nvfp4(codes, scales, global_scale, dtype, noise)
    index = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(1).int()
    groups = table(E2M1_VALUES, codes.device)[index].unflatten(1, (scales.shape[1], -1))
    step = (scales.float() * global_scale[:, None])[..., None]
    values = groups * step
    if noise is not None:
        noise_scale = noise.alpha * NVFP4_NOISE_STEP * step
        values += noise_scale * normal_pairs(noise, codes.numel(), codes.device).view(groups.shape)
    return values.flatten(1).to(dtype)
