"""Counter-based random numbers for initial weights, so that any part of a tensor can be generated independently.

decoder.py defines the distribution of each parameter.
"""

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from xorl.core.nn.roles import Drawn, LogUniform

# SplitMix64 (Steele, Lea and Flood, 2014, doi:10.1145/2714064.2660195), its unsigned constants as int64.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
_SECOND_FACTOR = 0x94D049BB133111EB - 2**64
# Values drawn at once: small enough for a CPU core's cache; enough to saturate a GPU, at about 400 MB of intermediates.
_CHUNK = {"cpu": 1 << 17}
_GPU_CHUNK = 1 << 24


def key_of(seed: int, name: str, shape: Sequence[int]) -> int:
    """A signed 64-bit key for the parameter `name` with this global shape."""
    digest = hashlib.blake2b(f"{seed}/{name}/{tuple(shape)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


@torch.no_grad()
def fill_normal_(
    part: Tensor,
    *,
    std: float,
    key: int,
    shape: Sequence[int],
    offset: Sequence[int],
    device: torch.device | None = None,
) -> None:
    """Fill `part`, a rectangular block of a tensor of `shape`, with independent normal values N(0, std^2).

    A value depends only on `key` and its flat index in `shape`. Values are computed in fp32; CPU and GPU agree up to
    the rounding of log, cos and sin.

    Args:
        part: of any dtype, on any device.
        offset: the index in the whole tensor of the first element of `part`.
        device: where values are computed; None means on the device of `part`.
    """

    def draw(start: int, stop: int, device: torch.device) -> Tensor:
        return normal(key, start, stop, device).mul_(std)

    _fill_(part, draw, shape=shape, offset=offset, device=device)


@torch.no_grad()
def fill_uniform_(
    part: Tensor,
    *,
    bound: float,
    key: int,
    shape: Sequence[int],
    offset: Sequence[int],
    device: torch.device | None = None,
) -> None:
    """Like `fill_normal_`, with independent uniform values between -bound and bound, identical on every device."""

    def draw(start: int, stop: int, device: torch.device) -> Tensor:
        return uniform(key, start, stop, device).mul_(bound)

    _fill_(part, draw, shape=shape, offset=offset, device=device)


@torch.no_grad()
def fill_drawn_(
    part: Tensor,
    values: Drawn,
    *,
    key: int,
    shape: Sequence[int],
    offset: Sequence[int],
    device: torch.device | None = None,
) -> None:
    """Like `fill_normal_`, with independent values from the distribution that `values` describes."""

    def log_uniform(start: int, stop: int, device: torch.device) -> Tensor:
        return _between(values.low, values.high, key, start, stop, device).log_()

    def softplus_log_uniform(start: int, stop: int, device: torch.device) -> Tensor:
        softplus = _between(math.log(values.low), math.log(values.high), key, start, stop, device).exp_()
        return softplus + (-(-softplus).expm1()).log()

    draw = log_uniform if isinstance(values, LogUniform) else softplus_log_uniform
    _fill_(part, draw, shape=shape, offset=offset, device=device)


def _between(low: float, high: float, key: int, start: int, stop: int, device: torch.device) -> Tensor:
    return uniform(key, start, stop, device).mul_((high - low) / 2).add_((high + low) / 2)


def _fill_(
    part: Tensor,
    draw: Callable[[int, int, torch.device], Tensor],
    *,
    shape: Sequence[int],
    offset: Sequence[int],
    device: torch.device | None,
) -> None:
    """Fill `part` in chunks of rows; `draw` returns the values [start, stop) of a stream."""
    if not part.numel():
        return
    device = part.device if device is None else device
    row_size = math.prod(shape[1:])
    columns = tuple(slice(start, start + size) for start, size in zip(offset[1:], part.shape[1:], strict=True))
    num_rows = max(1, _CHUNK.get(device.type, _GPU_CHUNK) // row_size)
    for rows in part.split(num_rows):
        start = offset[0] * row_size
        values = draw(start, start + len(rows) * row_size, device).view(len(rows), *shape[1:])
        rows.copy_(values[(slice(None), *columns)])
        offset = (offset[0] + len(rows), *offset[1:])


def normal(key: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Values [start, stop) of the stream of `key`: independent and standard normal, fp32.

    Each pair of values uses one SplitMix64 output: 32 bits for the radius and 24 for the angle of the Box-Muller
    transform (1958, doi:10.1214/aoms/1177706645). The largest magnitude is 6.8.
    """
    first = start // 2
    bits = _mix_(torch.arange(first, (stop + 1) // 2, device=device).mul_(_INCREMENT).add_(key))
    uniform = (bits & 0xFFFFFFFF).float().add_(0.5).mul_(2.0**-32)  # in (0, 1]
    radius = uniform.log_().mul_(-2.0).sqrt_()
    angle = (bits >> 40).float().mul_(2.0 * math.pi * 2.0**-24)  # in [-pi, pi)
    pairs = torch.empty(len(bits), 2, device=device)
    torch.mul(radius, angle.cos(), out=pairs[:, 0])
    torch.mul(radius, angle.sin_(), out=pairs[:, 1])
    return pairs.view(-1)[start - 2 * first : stop - 2 * first]


def uniform(key: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Values [start, stop) of the stream of `key`: independent and uniform in [-1, 1), fp32."""
    bits = _mix_(torch.arange(start, stop, device=device).mul_(_INCREMENT).add_(key))
    return (bits >> 40).float().mul_(2.0**-23)


def _mix_(state: Tensor) -> Tensor:
    """SplitMix64's output function, in place. int64 wraps around, and the masks make the shifts logical."""
    state ^= (state >> 30) & ((1 << 34) - 1)
    state *= _FIRST_FACTOR
    state ^= (state >> 27) & ((1 << 37) - 1)
    state *= _SECOND_FACTOR
    state ^= (state >> 31) & ((1 << 33) - 1)
    return state
