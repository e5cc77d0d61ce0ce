"""The table of models by architecture. A new family is one file beside this one, and its spec in `SPECS`."""

from collections.abc import Mapping
from types import MappingProxyType

from xorl.core.models import gpt2, llama, qwen2, qwen3
from xorl.core.models.decoder import Decoder
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.flops import matmul_parameters, training_flops
from xorl.core.models.hf_config import DROPOUT_KEYS
from xorl.core.models.recipes import LogicalModule, RowTarget, WeightRecipe, WeightSource
from xorl.core.models.spec import ModelSpec

__all__ = [
    "DROPOUT_KEYS",
    "SPECS",
    "Decoder",
    "DecoderConfig",
    "LogicalModule",
    "ModelSpec",
    "RowTarget",
    "WeightRecipe",
    "WeightSource",
    "matmul_parameters",
    "spec_for",
    "training_flops",
]

SPECS: Mapping[str, ModelSpec] = MappingProxyType(
    {spec.architecture: spec for spec in (gpt2.SPEC, llama.SPEC, qwen2.SPEC, qwen3.SPEC)}
)


def spec_for(hf_config: Mapping[str, object]) -> ModelSpec:
    """The family of a config.json, by the first entry of its `architectures`.

    Raises:
        ValueError: there is no such entry, or no such family; the message lists the families.
    """
    architectures = hf_config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(name, str) or name not in SPECS:
        raise ValueError(
            f"the model's config.json has architectures: {architectures!r}; its first entry must be one of "
            f"{', '.join(sorted(SPECS))}"
        )
    return SPECS[name]
