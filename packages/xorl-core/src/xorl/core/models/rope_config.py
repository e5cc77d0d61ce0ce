"""The rotary embedding in a config.json: `rope_parameters`, or the older `rope_scaling` and `rope_theta`."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

from xorl.core.models.hf_config import HFConfig
from xorl.core.nn import RopeConfig
from xorl.core.nn.rotary import RopeKind

DEFAULT_THETA = 10000.0
# config.json's `rope_type` -> kind. Families with other types extend this table.
ROPE_TYPES: Mapping[str, RopeKind] = MappingProxyType(
    {"default": "default", "linear": "linear", "dynamic": "dynamic", "yarn": "yarn"}
)


def read_rope(
    hf: HFConfig,
    max_position_embeddings: int,
    rope_types: Mapping[str, RopeKind] = ROPE_TYPES,
    *,
    partial_of: int | None = None,
    interleaved: bool = False,
    read: Collection[str] = (),
) -> RopeConfig:
    """The rotary embedding that a config.json describes.

    Args:
        partial_of: the channels of a head, for families of which `partial_rotary_factor` may rotate some; None: all
            channels rotate.
        interleaved: how this family pairs channels.
        read: further keys of the mapping, which the family reads itself.

    Raises ValueError for a type that is not in `rope_types`, a key unknown to the type, or a partial rotation where
    there is none.
    """
    hf.has("rope_parameters")  # marks it as read: if both are present, rope_scaling takes precedence
    rope = nested_rope(hf)
    fraction = rope.get("partial_rotary_factor", float, hf.get("partial_rotary_factor", float, 1.0))
    if partial_of is None:
        hf.expect("partial_rotary_factor", fraction, [1.0])
    rotary_dim = None if partial_of is None or fraction == 1.0 else int(partial_of * fraction)
    if rotary_dim == 0:
        raise ValueError(
            f"{hf.architecture}: partial_rotary_factor: {fraction} of the {partial_of} channels of a head rotates none"
        )
    theta = hf.get("rope_theta", float, DEFAULT_THETA)
    for key in read:
        rope.has(key)
    config = _read(hf, rope, theta, max_position_embeddings, rope_types)
    return replace(config, rotary_dim=rotary_dim, interleaved=interleaved)


def nested_rope(hf: HFConfig) -> HFConfig:
    """A reader for `rope_scaling` or, if config.json has none, for `rope_parameters`."""
    return hf.nested("rope_scaling" if hf.has("rope_scaling") else "rope_parameters")


def read_rope_of_type(
    hf: HFConfig,
    layer_type: str,
    theta: float,
    max_position_embeddings: int,
    rope_types: Mapping[str, RopeKind] = ROPE_TYPES,
    *,
    is_scaled: bool,
) -> RopeConfig:
    """The rotary embedding of a type of layer, of a config.json whose `rope_parameters` have an entry for each.

    theta: of a type without an entry. is_scaled: whether an older config.json's `rope_scaling` is that of this type.
    """
    by_type = hf.nested("rope_parameters")
    if by_type.has(layer_type):
        rope = by_type.nested(layer_type)
    else:
        rope = hf.nested("rope_scaling") if is_scaled else HFConfig({}, hf.architecture)
    if by_type.has("rope_type"):
        raise ValueError(f"{hf.architecture}: rope_parameters: must have an entry for each type of layer")
    return _read(hf, rope, theta, max_position_embeddings, rope_types)


def _read(
    hf: HFConfig, rope: HFConfig, theta: float, max_position_embeddings: int, rope_types: Mapping[str, RopeKind]
) -> RopeConfig:
    rope_type = rope.get("rope_type", str, rope.get("type", str, "default"))
    rope.has("type")
    kind = rope_types[rope.expect("rope_type", rope_type, rope_types)]
    theta = rope.get("rope_theta", float, theta)
    config = _READERS[kind](hf, rope, theta, max_position_embeddings)
    rope.refuse_unread()
    return config


def _read_default(hf: HFConfig, rope: HFConfig, theta: float, max_position_embeddings: int) -> RopeConfig:
    return RopeConfig(theta=theta)


def _read_linear(hf: HFConfig, rope: HFConfig, theta: float, max_position_embeddings: int) -> RopeConfig:
    return RopeConfig(theta=theta, kind="linear", factor=rope.get("factor", float))


def _read_dynamic(hf: HFConfig, rope: HFConfig, theta: float, max_position_embeddings: int) -> RopeConfig:
    return RopeConfig(
        theta=theta, kind="dynamic", factor=rope.get("factor", float), trained_length=max_position_embeddings
    )


def _read_banded(hf: HFConfig, rope: HFConfig, theta: float, max_position_embeddings: int) -> RopeConfig:
    return RopeConfig(
        theta=theta,
        kind="banded",
        factor=rope.get("factor", float),
        trained_length=_trained_length(hf, rope, max_position_embeddings),
        low_freq_factor=rope.get("low_freq_factor", float),
        high_freq_factor=rope.get("high_freq_factor", float),
    )


def _read_yarn(hf: HFConfig, rope: HFConfig, theta: float, max_position_embeddings: int) -> RopeConfig:
    trained_length = _trained_length(hf, rope, max_position_embeddings)
    factor = rope.get("factor", float, max_position_embeddings / trained_length)
    mscale, mscale_all_dim = rope.get("mscale", float, 0.0), rope.get("mscale_all_dim", float, 0.0)
    if mscale and mscale_all_dim:
        attention_factor = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    else:
        attention_factor = yarn_magnitude(factor, 1.0)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        trained_length=trained_length,
        beta_fast=rope.get("beta_fast", float, 32.0),
        beta_slow=rope.get("beta_slow", float, 1.0),
        truncate=rope.get("truncate", bool, True),
        attention_factor=rope.get("attention_factor", float, attention_factor),
    )


def _read_longrope(hf: HFConfig, rope: HFConfig, theta: float, max_position_embeddings: int) -> RopeConfig:
    trained_length = _trained_length(hf, rope, max_position_embeddings)
    factor = rope.get("factor", float, max_position_embeddings / trained_length)
    magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained_length))
    return RopeConfig(
        theta=theta,
        kind="longrope",
        trained_length=trained_length,
        attention_factor=rope.get("attention_factor", float, magnitude),
        short_factors=tuple(rope.items("short_factor", float)),
        long_factors=tuple(rope.items("long_factor", float)),
    )


def _read_proportional(hf: HFConfig, rope: HFConfig, theta: float, max_position_embeddings: int) -> RopeConfig:
    return RopeConfig(
        theta=theta,
        kind="proportional",
        factor=rope.get("factor", float, 1.0),
        rotated_fraction=rope.get("partial_rotary_factor", float, 1.0),
    )


def yarn_magnitude(factor: float, weight: float) -> float:
    """The scale of attention's inputs for an extended context (arXiv:2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _trained_length(hf: HFConfig, rope: HFConfig, max_position_embeddings: int) -> int:
    nested = rope.positive("original_max_position_embeddings", max_position_embeddings)
    return hf.positive("original_max_position_embeddings", nested)


_READERS: Mapping[RopeKind, Callable[[HFConfig, HFConfig, float, int], RopeConfig]] = MappingProxyType(
    {
        "default": _read_default,
        "linear": _read_linear,
        "dynamic": _read_dynamic,
        "yarn": _read_yarn,
        "banded": _read_banded,
        "longrope": _read_longrope,
        "proportional": _read_proportional,
    }
)
