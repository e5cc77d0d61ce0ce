"""Normal noise on dequantised weights, a function of the run's seed, the weight, the step and the element's index.

Two adjacent elements share one pair of random words, drawn as in `xorl.kernels.optim.noise`. So the forward, backward
and recomputed passes of a step use the same weight, however it is sharded, and a resumed run uses the same weights as
an uninterrupted one. This is plain torch; `blocks_triton` draws the same words, and its results differ only by
rounding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xorl.kernels.arguments import check_number
from xorl.kernels.optim.noise import KEY_STEP, philox2x32

# Factors that convert a word to a number in (0, 1], and to an angle (2**32 is a full turn).
UNIFORM = 2.0**-32
TURN = 2.0 * math.pi * 2.0**-32
# Taylor coefficients of sine, from the cubic term on, and of cosine, from the fourth power on. Up to an eighth of a
# turn the error is at most 4e-7.
SINE = (-1 / 6, 1 / 120, -1 / 5040)
COSINE = (1 / 24, -1 / 720, 1 / 40320)


@dataclass(frozen=True)
class WeightNoise:
    """Noise of alpha * unit * N(0, 1); the unit is half a quantisation step of the element's block.

    Attributes:
        alpha: the relative size of the noise.
        state: int64 on the weight's device: a key in [0, 2**31), derived from the weight and the run's seed, the
            optimizer step, and what `held_pairs` says. They are a tensor so that layers that differ only in them share
            compiled code.

    Raises ValueError for a negative alpha, or one that is not finite, and for a state of another shape or dtype.
    """

    alpha: float
    state: Tensor

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha)
        is_state = self.state.dim() == 1 and (len(self.state) == 3 or (len(self.state) >= 5 and len(self.state) % 2))
        if not is_state or self.state.dtype != torch.int64:
            raise ValueError(
                f"state must be torch.int64 [3], or [5], [7] and so on for parts of a weight; got "
                f"{self.state.dtype} {list(self.state.shape)}"
            )


def held_pairs(
    num_columns: int, rows: Sequence[tuple[int, int]] = ((0, 1),), columns: tuple[int, int] | None = None
) -> list[int]:
    """Where a rank's pairs of elements lie in a whole weight of `num_columns`, for the state of a `WeightNoise`.

    Args:
        num_columns: of the whole weight.
        rows: the ranges [start, stop) of its rows that the rank holds, in the order held.
        columns: the range of columns that it holds of these; None: all.

    Returns:
        [offset] if pair i of the rank is pair i + offset of the weight. Otherwise [offset, width, stride, ..]: the
        pairs in a row of the rank and of the weight, and for each later range of rows its first pair and its offset, so
        that pair i of the rank is pair i // width * stride + i % width + offset of the weight.
    """
    first, last = columns or (0, num_columns)
    width, stride = (last - first) // 2, num_columns // 2
    ranges: list[int] = []
    taken = 0
    for start, stop in rows:
        if start < stop:
            ranges += [taken * (last - first) // 2, (start - taken) * num_columns // 2 + first // 2]
            taken += stop - start
    _, offset, *later = ranges or [0, 0]
    return [offset] if columns is None and not later else [offset, width, stride, *later]


def normal_pairs(noise: WeightNoise, num_pairs: int, device: torch.device) -> Tensor:
    """Independent standard normal numbers, fp32 [2 * num_pairs], by the Box-Muller transform of each pair of words."""
    low, high = _draw(noise.state.to(device), num_pairs)
    radius = low.float().add_(0.5).mul_(UNIFORM).log_().mul_(-2.0).sqrt_()
    quarter = (high + (1 << 29)) >> 30  # the nearest multiple of a quarter turn, 0 to 4
    x = (high - (quarter << 30)).float().mul_(TURN)  # the remaining angle, at most an eighth of a turn
    square = x * x
    sine = x * (1.0 + square * (SINE[0] + square * (SINE[1] + square * SINE[2])))
    cosine = 1.0 + square * (-0.5 + square * (COSINE[0] + square * (COSINE[1] + square * COSINE[2])))
    is_odd_quarter = (quarter & 1) != 0
    one, other = torch.where(is_odd_quarter, sine, cosine), torch.where(is_odd_quarter, cosine, sine)
    one = torch.where(((quarter + 1) & 2) != 0, -one, one)
    other = torch.where((quarter & 2) != 0, -other, other)
    return torch.stack((radius * one, radius * other), dim=-1).flatten()


def _draw(state: Tensor, num_pairs: int) -> tuple[Tensor, Tensor]:
    """The two random words of each pair, int64 [num_pairs] each, drawn as for stochastic rounding."""
    key, step, offset, *layout = state.unbind()
    index = torch.arange(num_pairs, device=key.device)
    if layout:
        width, stride, *later = layout
        for first, following in zip(later[::2], later[1::2], strict=True):
            offset = torch.where(index >= first, following, offset)
        index = index // width * stride + index % width
    index = index + offset
    mask = 0xFFFFFFFF
    # The index's upper half changes the key, so that weights of more than 2**32 pairs do not repeat words.
    keys = ((index >> 32) * KEY_STEP + key) & mask
    return philox2x32(index & mask, (step & mask).expand_as(index), keys)
