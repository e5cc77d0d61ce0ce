"""Weights in E4M3 with one fp32 scale for each square block, 128 x 128 by default (arXiv:2412.19437, section 3.3.2).

A weight is code * scale. Codes and scales have the format of Hugging Face's `weight` and `weight_scale_inv`. Blocks at
the bottom and right edges may be incomplete.

Error: at most a sixteenth of the weight or 2**-10 of the block's scale, whichever is larger. The scale is the block's
largest absolute value divided by 448.

Shapes: R rows, C columns, G the side of a block.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from xorl.kernels.quant.device import blocks_triton
from xorl.kernels.quant.formats import BLOCK_FP8_NOISE_STEP, E4M3_LARGEST
from xorl.kernels.quant.noise import WeightNoise, normal_pairs


def quantize_block_fp8(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """weight [R, C] -> (codes E4M3 [R, C], scales fp32 [ceil(R / G), ceil(C / G)]); blocks of zeros get the scale 1."""
    if weight.is_cuda:
        return blocks_triton().quantize_block_fp8(weight, group_size)
    wide = weight.float()
    num_rows, num_columns = wide.shape
    padded = F.pad(wide, (0, -num_columns % group_size, 0, -num_rows % group_size))
    blocks = padded.unflatten(1, (-1, group_size)).unflatten(0, (-1, group_size))  # [R / G, G, C / G, G]
    scales = blocks.abs().amax(dim=(1, 3)) / E4M3_LARGEST
    scales = torch.where(scales == 0, 1.0, scales)
    scaled = wide / _by_element(scales, wide, group_size)
    return scaled.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn), scales


def dequantize_block_fp8(
    codes: Tensor, scales: Tensor, group_size: int, dtype: torch.dtype, noise: WeightNoise | None = None
) -> Tensor:
    """[R, C] in `dtype`: code * scale, plus noise, computed in fp32 and rounded once."""
    if codes.is_cuda:
        return blocks_triton().dequantize_block_fp8(codes, scales, group_size, dtype, noise)
    by_element = _by_element(scales, codes, group_size)
    values = codes.float() * by_element
    if noise is not None:
        normal = normal_pairs(noise, -(-codes.numel() // 2), codes.device)[: codes.numel()]
        values += noise.alpha * BLOCK_FP8_NOISE_STEP * by_element * normal.view(codes.shape)
    return values.to(dtype)


def _by_element(scales: Tensor, like: Tensor, group_size: int) -> Tensor:
    """The scale of each element, [R, C]."""
    num_rows, num_columns = like.shape
    by_row = scales.repeat_interleave(group_size, 0)[:num_rows]
    return by_row.repeat_interleave(group_size, 1)[:, :num_columns]
