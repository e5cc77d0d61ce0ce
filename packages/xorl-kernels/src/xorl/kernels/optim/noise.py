"""Random bits that do not depend on the rank that draws them, and stochastic rounding to bf16 with such bits.

This is plain torch; `triton_updates.py` draws the same bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Philox-2x32 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), table 2: seven rounds are the
# fewest that pass BigCrush. Memory traffic hides the cost of seven rounds, but not that of ten, the default of the
# authors' library.
MULTIPLIER = 0xD256D193
KEY_STEP = 0x9E3779B9
ROUNDS = 7
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Noise:
    """Identifies the random bits of elements of a parameter in one step.

    The bits depend on the key, the step and each element's index in the whole parameter. So a shard draws the same bits
    as the whole parameter, and a resumed run draws the same bits as an uninterrupted one.

    Attributes:
        key: derived from the parameter and the run's seed, in [0, 2**31).
        first: row-major index of the first element in the whole parameter.
        step: 0-dim int64 tensor on the elements' device.
        width, stride: if the elements are some columns of a matrix: their number, and that of all columns. 0: the
            elements follow each other in the whole parameter.
    """

    key: int
    first: int
    step: Tensor
    width: int = 0
    stride: int = 0

    def index_of(self, element: int) -> int:
        """The row-major index of an element in the whole parameter."""
        return self.first + (element // self.width * self.stride + element % self.width if self.width else element)


def philox2x32(low: Tensor, high: Tensor, key: Tensor | int, num_rounds: int = ROUNDS) -> tuple[Tensor, Tensor]:
    """Two 32-bit random words for each counter (low, high); all are int64 tensors of values below 2**32."""
    low, high = low.clone(), high.clone()
    product = torch.empty_like(low)
    for _ in range(num_rounds):
        # The product has up to 64 bits. As int64 it may overflow to a negative number, but its bits are correct.
        torch.mul(low, MULTIPLIER, out=product)
        torch.bitwise_right_shift(product, 32, out=low)
        low.bitwise_and_(_MASK).bitwise_xor_(high).bitwise_xor_(key)
        torch.bitwise_and(product, _MASK, out=high)
        key = (key + KEY_STEP) & _MASK
    return low, high


def draw(noise: Noise, start: int, count: int) -> tuple[Tensor, Tensor]:
    """The two random words, int64 [count] each, of the elements [start, start + count) counted from `noise.first`."""
    first, last = noise.index_of(start), noise.index_of(start + count - 1)
    if noise.width:
        element = torch.arange(start, start + count, device=noise.step.device)
        index = noise.first + element // noise.width * noise.stride + element % noise.width
    else:
        index = torch.arange(first, first + count, device=noise.step.device)
    # The index's upper half changes the key, so that parameters of more than 2**32 elements do not repeat bits.
    upper = first >> 32 if first >> 32 == last >> 32 else index >> 32
    key = (upper * KEY_STEP + noise.key) & _MASK
    return philox2x32(index & _MASK, (noise.step & _MASK).expand_as(index), key)


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 values to bf16, up or down with probabilities that preserve the mean; `bits` are in [0, 2**16).

    Random bits are added below bf16's last place; they carry into it with a probability equal to the truncated
    fraction. NaN and values that bf16 can represent do not change.
    """
    raw = values.view(torch.int32)
    rounded = torch.where(values.isnan(), raw, raw + bits.to(torch.int32))
    return (rounded & -0x10000).view(torch.float32).to(torch.bfloat16)
