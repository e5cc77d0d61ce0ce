"""Rotary position embedding (arXiv:2104.09864), and the scaling of its frequencies to longer contexts.

Frequencies depend only on the configuration. They are kept on the host and not in a parameter or buffer, so building on
the meta device, `to_empty` and dtype casts cannot lose or round them. Cosines and sines are computed in fp32 once per
forward pass.

Shapes: T tokens, N documents, C channels of a head.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from xorl.kernels.arguments import check_choice
from xorl.kernels.copies import copy_to
from xorl.kernels.fused import RopeTables
from xorl.kernels.layout import SequenceLayout

RopeKind = Literal["default", "linear", "dynamic", "yarn", "banded", "longrope", "proportional"]


@dataclass(frozen=True)
class RopeConfig:
    """Defines the frequencies of a rotary embedding.

    Attributes:
        theta: the base; channel pair i rotates by theta ** (-2i / C) per position.
        kind: default; linear (positions divided by factor); dynamic (NTK-aware: the base grows with the document's
            length beyond the trained length); yarn (arXiv:2309.00071); banded (low frequencies divided by factor,
            high ones kept, linear interpolation between); longrope (each frequency divided by a factor of its own, one
            for documents up to the trained length and another for longer ones, arXiv:2402.13753); proportional (only
            the pairs with the highest frequencies rotate, those of the first `rotated_fraction`).
        factor: the ratio of the extended context length to the trained one.
        trained_length: the context length in pre-training, in tokens.
        low_freq_factor, high_freq_factor: for banded; trained_length divided by each gives the longest and shortest
            wavelength of the interpolated band.
        beta_fast, beta_slow: for yarn; rotations within the trained length at which interpolation starts and at which
            it is complete.
        truncate: for yarn; round these bounds outwards to whole channel pairs.
        attention_factor: the factor on cosines and sines.
        short_factors, long_factors: for longrope, by channel pair.
        rotated_fraction: for proportional.
        rotary_dim: how many channels of a head rotate, the first ones; None: all of them.
        interleaved: whether channels 2i and 2i + 1 are a pair, instead of i and i + rotary_dim / 2.
        axes: by channel pair, the axis whose coordinate it rotates by, where tokens have coordinates on several axes;
            empty: all rotate by the position.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    trained_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    rotated_fraction: float = 1.0
    rotary_dim: int | None = None
    interleaved: bool = False
    axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, RopeKind)
        for name in ("theta", "factor"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: must be a number above 0, got {getattr(self, name)!r}")

    def check_factors(self, head_dim: int) -> None:
        """Raise ValueError unless longrope has a factor for each channel pair of heads of `head_dim` channels."""
        num_pairs = (self.rotary_dim or head_dim) // 2
        for name in ("short_factors", "long_factors"):
            found = len(getattr(self, name))
            if self.kind == "longrope" and found != num_pairs:
                raise ValueError(
                    f"{name}: longrope needs {num_pairs}, one for each channel pair, but there are {found}"
                )

    @property
    def depends_on_length(self) -> bool:
        """Whether documents beyond the trained length have other frequencies."""
        return self.kind in ("dynamic", "longrope")


class Rotary:
    """Computes the cosine and sine tables of each forward pass; built once per model."""

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"head_dim: channels rotate in pairs, so it must be even, got {head_dim!r}")
        self.config = config
        self.head_dim = head_dim = config.rotary_dim or head_dim
        # Computed on the CPU even if the model is being built on the meta device.
        self.inv_freq = ROPE_KINDS[config.kind](config, head_dim)  # [C / 2]
        self._on_device: dict[torch.device, Tensor] = {}

    def tables(self, layout: SequenceLayout, device: torch.device, coordinates: Tensor | None = None) -> RopeTables:
        """The cosines and sines for the tokens of `layout`, on `device`.

        coordinates: [T, axes] of these tokens; None: all are the position.
        """
        if self.config.depends_on_length and layout.max_seqlen > self.config.trained_length:
            inv_freq = layout.local(self._inv_freq_by_token(layout.whole, device))  # [T, C / 2]
        else:
            if device not in self._on_device:
                self._on_device[device] = self.inv_freq.to(device)
            inv_freq = self._on_device[device]
        places = layout.positions[:, None]
        if coordinates is not None and self.config.axes:
            places = coordinates[:, list(self.config.axes)]
        angles = places.float() * inv_freq  # [T, C / 2]
        factor = self.config.attention_factor
        return angles.cos() * factor, angles.sin() * factor

    def _inv_freq_by_token(self, layout: SequenceLayout, device: torch.device) -> Tensor:
        """Frequencies by each document's own length, so that they do not depend on other documents in the pack."""
        rows = torch.stack(
            [
                self.inv_freq if length <= self.config.trained_length else self._of_long_document(length)
                for length in layout.lengths
            ]
        )  # [N, C / 2]
        rows = copy_to(device, rows)
        counts = layout.cu_seqlens.to(device).diff()
        return rows.repeat_interleave(counts, dim=0, output_size=layout.num_tokens)

    def _of_long_document(self, length: int) -> Tensor:
        """The frequencies for a document that is longer than the trained length."""
        if self.config.kind == "longrope":
            return _divided(self.config, self.head_dim, self.config.long_factors)
        return _inverse_frequencies(_dynamic_theta(self.config, self.head_dim, length), self.head_dim)


def _inverse_frequencies(theta: float, head_dim: int) -> Tensor:
    """theta ** (-2i / C) for each channel pair i, [C / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return 1.0 / (theta**exponents)


def _default(config: RopeConfig, head_dim: int) -> Tensor:
    return _inverse_frequencies(config.theta, head_dim)


def _linear(config: RopeConfig, head_dim: int) -> Tensor:
    return _inverse_frequencies(config.theta, head_dim) / config.factor


def _longrope(config: RopeConfig, head_dim: int) -> Tensor:
    return _divided(config, head_dim, config.short_factors)


def _divided(config: RopeConfig, head_dim: int, factors: tuple[float, ...]) -> Tensor:
    return _inverse_frequencies(config.theta, head_dim) / torch.tensor(factors, dtype=torch.float32, device="cpu")


def _proportional(config: RopeConfig, head_dim: int) -> Tensor:
    inv_freq = _inverse_frequencies(config.theta, head_dim) / config.factor
    inv_freq[int(config.rotated_fraction * head_dim / 2) :] = 0
    return inv_freq


def _dynamic_theta(config: RopeConfig, head_dim: int, length: int) -> float:
    stretch = config.factor * length / config.trained_length - (config.factor - 1)
    return config.theta * stretch ** (head_dim / (head_dim - 2))


def _banded(config: RopeConfig, head_dim: int) -> Tensor:
    inv_freq = _inverse_frequencies(config.theta, head_dim)
    wavelength = 2 * math.pi / inv_freq
    low, high = config.low_freq_factor, config.high_freq_factor
    # 0 at the longest wavelength of the band, 1 at the shortest.
    blend = (config.trained_length / wavelength - low) / (high - low)
    blended = (1 - blend) * inv_freq / config.factor + blend * inv_freq
    stretched = torch.where(wavelength > config.trained_length / low, inv_freq / config.factor, blended)
    return torch.where(wavelength < config.trained_length / high, inv_freq, stretched)


def _yarn(config: RopeConfig, head_dim: int) -> Tensor:
    def pair_of(turns: float) -> float:
        """The (fractional) index of the channel pair that rotates this often within the trained length."""
        return head_dim * math.log(config.trained_length / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = pair_of(config.beta_fast), pair_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # avoids division by zero; the ramp becomes a step
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    powers = config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    return 1.0 / (config.factor * powers) * (1 - kept) + 1.0 / powers * kept


ROPE_KINDS: Mapping[RopeKind, Callable[[RopeConfig, int], Tensor]] = MappingProxyType(
    # Of documents up to the trained length: a dynamic embedding equals the default one there.
    {
        "default": _default,
        "linear": _linear,
        "dynamic": _default,
        "yarn": _yarn,
        "banded": _banded,
        "longrope": _longrope,
        "proportional": _proportional,
    }
)
