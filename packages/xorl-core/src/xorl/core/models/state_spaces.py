"""Names shared by families whose layers have state spaces."""

from collections.abc import Mapping
from types import MappingProxyType

from xorl.core.models import rotary_gated
from xorl.core.models.hf_config import HFConfig

STATES = "linear_attention"
# Those of mixers in released files.
OLDER_NAMES: Mapping[str, str] = MappingProxyType({"mamba": STATES, "attention": rotary_gated.FULL})


def module_names(module: str) -> Mapping[str, str]:
    """The names of the parts of a state space, for families that have it under `module`, relative to the layer."""
    parts = {f"linear_attn.{name}": f"{module}.{name}" for name in ("in_proj", "conv1d", "norm", "out_proj")}
    return MappingProxyType({**parts, "linear_attn.decay": module})


def read_types(hf: HFConfig, key: str, allowed: tuple[str, ...]) -> list[str]:
    """The kind of each layer, from a list of names or older names."""
    types = [OLDER_NAMES.get(each, each) for each in hf.items(key, str)]
    for each in types:
        hf.expect(key, each, allowed)
    return types
