"""Random bits that depend on their purpose and not on the rank that draws them, and rounding to bf16 with them.

In plain torch; `triton_updates.py` draws the same bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Philox-2x32 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), table 2: seven rounds are the
# fewest that pass BigCrush. Ten, the default of its authors' library, would take longer than the memory traffic that
# hides them.
MULTIPLIER = 0xD256D193
KEY_STEP = 0x9E3779B9
ROUNDS = 7
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Noise:
    """Identifies the random bits of a run of consecutive elements of a parameter in a step.

    They depend on the key, the step and each element's index in the whole parameter. So a shard draws the same bits as
    the whole parameter, and a resumed run the same as an uninterrupted one.

    Attributes:
        key: of the parameter and the run's seed, in [0, 2**31).
        first: index in the whole parameter, in row-major order, of the first element.
        step: 0-dim int64 tensor on the elements' device.
    """

    key: int
    first: int
    step: Tensor


def philox2x32(low: Tensor, high: Tensor, key: Tensor | int, num_rounds: int = ROUNDS) -> tuple[Tensor, Tensor]:
    """Two 32-bit random words for each counter (low, high); all are int64 tensors of values below 2**32."""
    low, high = low.clone(), high.clone()
    product = torch.empty_like(low)
    for _ in range(num_rounds):
        # The product has up to 64 bits: as int64 it may be negative, but its bits are right.
        torch.mul(low, MULTIPLIER, out=product)
        torch.bitwise_right_shift(product, 32, out=low)
        low.bitwise_and_(_MASK).bitwise_xor_(high).bitwise_xor_(key)
        torch.bitwise_and(product, _MASK, out=high)
        key = (key + KEY_STEP) & _MASK
    return low, high


def draw(noise: Noise, start: int, count: int) -> tuple[Tensor, Tensor]:
    """The two random words of elements [start, start + count) of a run, int64 [count]."""
    first = noise.first + start
    index = torch.arange(first, first + count, device=noise.step.device)
    # Parameters of more than 2**32 elements repeat no bits: the index's upper half changes the key.
    is_one = first >> 32 == (first + count - 1) >> 32
    upper = first >> 32 if is_one else index >> 32
    key = (upper * KEY_STEP + noise.key) & _MASK
    return philox2x32(index & _MASK, (noise.step & _MASK).expand_as(index), key)


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """Rounds fp32 values to bf16, up or down with probabilities that keep the mean. bits: integers in [0, 2**16).

    Adding the bits below bf16's last place carries into it with a probability equal to the fraction cut off. Values
    that bf16 can represent do not change, nor does NaN.
    """
    raw = values.view(torch.int32)
    rounded = torch.where(values.isnan(), raw, raw + bits.to(torch.int32))
    return (rounded & -0x10000).view(torch.float32).to(torch.bfloat16)
