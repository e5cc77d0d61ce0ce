"""NF4: 4-bit codes that index quantiles of the normal distribution (arXiv:2305.14314), with a scale for each group.

Codes and scales are interchangeable with those of bitsandbytes: the same table, an fp32 scale that is the group's
largest absolute value, and two codes per byte, the earlier weight in the upper four bits. A group is `group_size`
adjacent weights of one row.

Error: at most half the gap between adjacent table entries times the group's scale, plus the rounding to the requested
dtype. For the widest gap, the first term is 0.152 times the scale (`MAX_ERROR`).

Shapes: R rows, C columns, G group size.
"""

import torch
from torch import Tensor

from xorl.kernels.quant.device import blocks_triton
from xorl.kernels.quant.formats import NF4_NOISE_STEP, NF4_TINY, NF4_VALUES, nf4_bounds, table
from xorl.kernels.quant.noise import WeightNoise, normal_pairs

# The largest error, relative to the scale of the group: half of the widest gap in the table, between -1 and -0.696.
MAX_ERROR = 0.1519036


def quantize_nf4(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """weight [R, C], any floating-point dtype -> (codes uint8 [R, C / 2], scales fp32 [R, C / G]); G must divide C."""
    if weight.is_cuda:
        return blocks_triton().quantize_nf4(weight, group_size)
    groups = weight.float().unflatten(1, (-1, group_size))  # [R, C / G, G]
    absmax = groups.abs().amax(dim=-1)
    scaled = (groups * (1.0 / absmax.clamp(min=NF4_TINY))[..., None]).clamp(-1.0, 1.0)
    codes = torch.bucketize(scaled, table(nf4_bounds(), weight.device), out_int32=True).to(torch.uint8).flatten(1)
    return codes[:, ::2] << 4 | codes[:, 1::2], absmax


def dequantize_nf4(codes: Tensor, absmax: Tensor, dtype: torch.dtype, noise: WeightNoise | None = None) -> Tensor:
    """[R, C] in `dtype`: table entry * scale, plus noise, computed in fp32 and rounded once."""
    if codes.is_cuda:
        return blocks_triton().dequantize_nf4(codes, absmax, dtype, noise)
    index = torch.stack((codes >> 4, codes & 0xF), dim=-1).flatten(1).int()
    groups = table(NF4_VALUES, codes.device)[index].unflatten(1, (absmax.shape[1], -1))
    values = groups * absmax[..., None]
    if noise is not None:
        noise_scale = noise.alpha * NF4_NOISE_STEP * absmax[..., None]
        values += noise_scale * normal_pairs(noise, codes.numel(), codes.device).view(groups.shape)
    return values.flatten(1).to(dtype)
