"""NVFP4: E2M1 codes of four bits, an E4M3 scale for each 16 weights of a row, and one fp32 scale for the matrix.

A weight is code * scale * global scale. The global scale maps the largest block scale to the top of E4M3's range. Two
codes share a byte, with the earlier weight in the lower four bits, as in checkpoints of NVIDIA's ModelOpt.

Error, with step = scale * global scale: a quarter of a step up to two steps, half a step up to four, one step beyond.
If a block's scale was rounded down, values above six steps are clipped: by a seventeenth of the block's largest value
at most, if the scale is a normal number of E4M3. Scales of blocks below 1/28672 of the matrix's largest value are
subnormal, and become zero from half of the smallest subnormal down.

Shapes: R rows, C columns, G group size.
"""

import torch
from torch import Tensor

from xorl.kernels.quant.device import blocks_triton
from xorl.kernels.quant.nf4 import table
from xorl.kernels.quant.noise import WeightNoise, normal_pairs

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
LARGEST = 6.0
LARGEST_SCALE = 448.0
# Magnitudes between neighbours round up above the first of each pair and from the second on: to even, as in E2M1.
ABOVE = (0.25, 1.25, 2.5, 5.0)
FROM = (0.75, 1.75, 3.5)
# In steps: the unit of the noise.
NOISE_STEP = 0.5


def nvfp4_global_scale(amax: Tensor) -> Tensor:
    """The global scale, fp32 [], of a matrix whose largest absolute value is `amax` []; 1 for a matrix of zeros."""
    scale = amax.float() / (LARGEST * LARGEST_SCALE)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def quantize_nvfp4(weight: Tensor, global_scale: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """weight [R, C] to codes, uint8 [R, C / 2], and block scales, E4M3 [R, C / G], for global scales fp32 [R].

    G must divide C. Rows of one matrix have the same global scale; those of matrices stacked into one may differ.
    """
    if weight.is_cuda:
        return blocks_triton().quantize_nvfp4(weight, global_scale, group_size)
    groups = weight.float().unflatten(1, (-1, group_size))  # [R, C / G, G]
    wide = global_scale[:, None]
    absmax = groups.abs().amax(dim=-1)
    scales = (absmax / LARGEST / wide).clamp(max=LARGEST_SCALE)
    scales = torch.where(absmax.isfinite(), scales, torch.nan).to(torch.float8_e4m3fn)
    step = (scales.float() * wide)[..., None]
    scaled = torch.where(step == 0, 0.0, groups / step)
    size = scaled.abs()
    codes = torch.zeros_like(size, dtype=torch.uint8)
    for limit in ABOVE:
        codes += size > limit
    for limit in FROM:
        codes += size >= limit
    codes = (codes | (scaled < 0).to(torch.uint8) << 3).flatten(1)
    return codes[:, 1::2] << 4 | codes[:, ::2], scales


def dequantize_nvfp4(
    codes: Tensor, scales: Tensor, global_scale: Tensor, dtype: torch.dtype, noise: WeightNoise | None = None
) -> Tensor:
    """[R, C] of `dtype`: code * (scale * global scale) in fp32, plus noise, rounded once."""
    if codes.is_cuda:
        return blocks_triton().dequantize_nvfp4(codes, scales, global_scale, dtype, noise)
    index = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(1).int()
    groups = table(VALUES, codes.device)[index].unflatten(1, (scales.shape[1], -1))
    step = (scales.float() * global_scale[:, None])[..., None]
    values = groups * step
    if noise is not None:
        size = noise.alpha * NOISE_STEP * step
        values += size * normal_pairs(noise, codes.numel(), codes.device).view(groups.shape)
    return values.flatten(1).to(dtype)
