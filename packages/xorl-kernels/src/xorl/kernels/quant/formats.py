"""Constants of the number formats, shared by the plain functions and the Triton kernels.

They are in a separate file to avoid an import cycle: the plain functions import the kernels.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

# fp8: the largest number of each format is 1.75 times two to this power.
TOP_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
# A smaller amax is raised to this; otherwise the scale would exceed the exponent range of fp32.
SMALLEST_AMAX = 2.0**-100
# The matrix units require the lengths of contiguous dimensions to be multiples of this.
ALIGNMENT = 16

# The unit of the noise on a dequantised weight, as a multiple of the block's scale (nvfp4: scale * global scale).
NF4_NOISE_STEP = 0.5 * 0.0796  # half of the narrowest gap in NF4_VALUES, beside zero
NVFP4_NOISE_STEP = 0.5
BLOCK_FP8_NOISE_STEP = 0.125

# NF4: quantiles of the normal distribution, from bitsandbytes.
NF4_VALUES = (
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
# The smallest divisor, used for a group of zeros; a subnormal number, as in bitsandbytes.
NF4_TINY = 1e-38

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E2M1_LARGEST = 6.0
E4M3_LARGEST = 448.0


def nf4_bounds() -> tuple[float, ...]:
    """For each pair of adjacent NF4_VALUES, the fp32 value above which the upper one is chosen."""
    values = torch.tensor(NF4_VALUES)
    return tuple(((values[:-1] + values[1:]) / 2).tolist())


@cache
def table(values: Sequence[float], device: torch.device) -> Tensor:
    """`values` in fp32 on `device`, copied there once."""
    return torch.tensor(values, dtype=torch.float32, device=device)


def padded(num_rows: int) -> int:
    """The number of rows rounded up to a multiple of ALIGNMENT."""
    return (num_rows + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
