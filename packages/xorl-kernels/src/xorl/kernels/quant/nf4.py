"""NF4: 4-bit codes that index quantiles of the normal distribution (arXiv:2305.14314), with a scale for each group.

Codes and scales are compatible with bitsandbytes in both directions: its table, the largest absolute value of each
group in fp32, two codes per byte with the earlier weight in the upper four bits. A group is a run of `group_size`
weights of one row. Error: half the distance between neighbours of the table times the group's scale, at most 0.152 of
it (`MAX_ERROR`), plus the rounding to the requested dtype.

Shapes: R rows, C columns, G group size.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from xorl.kernels.quant.device import blocks_triton
from xorl.kernels.quant.noise import WeightNoise, normal_pairs

VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# The largest error, relative to the scale of the group: half of the widest gap, between -1 and -0.696.
MAX_ERROR = 0.1519036
# Half of the narrowest gap (beside zero): the unit of the noise.
NOISE_STEP = 0.5 * 0.0796
# The divisor for a group of zeros; a subnormal number, as in bitsandbytes.
TINY = 1e-38


def quantize_nf4(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """weight [R, C] of any floating dtype to codes, uint8 [R, C / 2], and scales, fp32 [R, C / G]. G must divide C."""
    if weight.is_cuda:
        return blocks_triton().quantize_nf4(weight, group_size)
    groups = weight.float().unflatten(1, (-1, group_size))  # [R, C / G, G]
    absmax = groups.abs().amax(dim=-1)
    scaled = (groups * (1.0 / absmax.clamp(min=TINY))[..., None]).clamp(-1.0, 1.0)
    codes = torch.bucketize(scaled, table(bounds(), weight.device), out_int32=True).to(torch.uint8).flatten(1)
    return codes[:, ::2] << 4 | codes[:, 1::2], absmax


def dequantize_nf4(codes: Tensor, absmax: Tensor, dtype: torch.dtype, noise: WeightNoise | None = None) -> Tensor:
    """[R, C] of `dtype`: table entry times scale in fp32, plus noise, rounded once."""
    if codes.is_cuda:
        return blocks_triton().dequantize_nf4(codes, absmax, dtype, noise)
    index = torch.stack((codes >> 4, codes & 0xF), dim=-1).flatten(1).int()
    groups = table(VALUES, codes.device)[index].unflatten(1, (absmax.shape[1], -1))
    values = groups * absmax[..., None]
    if noise is not None:
        size = noise.alpha * NOISE_STEP * absmax[..., None]
        values += size * normal_pairs(noise, codes.numel(), codes.device).view(groups.shape)
    return values.flatten(1).to(dtype)


def bounds() -> tuple[float, ...]:
    """For each two neighbours of the table, in fp32: the value above which the upper one is chosen."""
    values = torch.tensor(VALUES)
    return tuple(((values[:-1] + values[1:]) / 2).tolist())


@cache
def table(values: Sequence[float], device: torch.device) -> Tensor:
    """`values` in fp32 on `device`, copied there once."""
    return torch.tensor(values, dtype=torch.float32, device=device)
