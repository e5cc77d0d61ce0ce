"""Model families by architecture. To add a family, add a file here and its spec to `SPECS`."""

from collections.abc import Mapping
from types import MappingProxyType

from xorl.core.models import (
    apertus,
    arcee,
    cohere2,
    deepseek_v3,
    dots1,
    ernie4_5,
    exaone4,
    gemma2,
    gemma3,
    gemma4,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt2,
    gpt_oss,
    granite,
    granitemoehybrid,
    hunyuan_v1_dense,
    lfm2,
    llama,
    llava,
    minimax_m2,
    ministral3,
    mistral,
    mixtral,
    nemotron_h,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    seed_oss,
    smollm3,
    solar_open,
    starcoder2,
)
from xorl.core.models.causal_lm import CausalLM
from xorl.core.models.composite import TEXT_CONFIG, spec_within, text_values
from xorl.core.models.decoder import Decoder
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.decoder_layer import DecoderLayer
from xorl.core.models.flops import training_flops
from xorl.core.models.gpt2 import GPT2
from xorl.core.models.llava import PLACEHOLDER_KEY, ComposedWeights, composed_config, processor_config
from xorl.core.models.spec import ModelSpec

__all__ = [
    "GPT2",
    "IMAGE_SPECS",
    "PLACEHOLDER_KEY",
    "SPECS",
    "CausalLM",
    "ComposedWeights",
    "Decoder",
    "DecoderConfig",
    "DecoderLayer",
    "ModelSpec",
    "composed_config",
    "processor_config",
    "spec_for",
    "training_flops",
]

SPECS: Mapping[str, ModelSpec] = MappingProxyType(
    {
        spec.architecture: spec
        for spec in (
            apertus.SPEC,
            arcee.SPEC,
            cohere2.SPEC,
            deepseek_v3.SPEC,
            dots1.SPEC,
            ernie4_5.SPEC,
            exaone4.SPEC,
            gemma2.SPEC,
            gemma3.SPEC,
            gemma4.SPEC,
            glm4.SPEC,
            glm4_moe.SPEC,
            glm4_moe_lite.SPEC,
            gpt2.SPEC,
            gpt_oss.SPEC,
            granite.SPEC,
            granitemoehybrid.SPEC,
            hunyuan_v1_dense.SPEC,
            lfm2.SPEC,
            llama.SPEC,
            minimax_m2.SPEC,
            ministral3.SPEC,
            mistral.SPEC,
            mixtral.SPEC,
            nemotron_h.SPEC,
            olmo2.SPEC,
            olmo3.SPEC,
            olmoe.SPEC,
            phi3.SPEC,
            qwen2.SPEC,
            qwen2_moe.SPEC,
            qwen3.SPEC,
            qwen3_5.SPEC,
            qwen3_5_moe.SPEC,
            qwen3_moe.SPEC,
            qwen3_next.SPEC,
            seed_oss.SPEC,
            smollm3.SPEC,
            solar_open.SPEC,
            starcoder2.SPEC,
        )
    }
)


# Models that read images: their specs are found by `spec_for` too, like those that have any decoder and a tower.
IMAGE_SPECS: Mapping[str, ModelSpec] = MappingProxyType({spec.architecture: spec for spec in (qwen3_vl.SPEC,)})


def spec_for(hf_config: Mapping[str, object]) -> ModelSpec:
    """Return the model family of a config.json, by the first entry of its `architectures`.

    For a composite model, it is the spec of its text model with the composite's names.

    Raises:
        ValueError: the entry is missing or the family is not supported; the message lists the supported ones.
    """
    if not isinstance(hf_config, Mapping):
        raise ValueError(
            f"hf_config: must be the mapping of a config.json, got {type(hf_config).__name__}; a configuration of "
            "transformers has to_dict()"
        )
    architectures = hf_config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    whole = {**SPECS, **IMAGE_SPECS}
    if isinstance(name, str) and name in whole:
        return whole[name]
    is_composed = name == llava.ARCHITECTURE
    texts = [spec for spec in SPECS.values() if is_composed or name in spec.composites]
    if not isinstance(name, str) or not texts:
        known = sorted({*whole, llava.ARCHITECTURE, *(each for spec in SPECS.values() for each in spec.composites)})
        raise ValueError(
            f"the model's config.json has architectures: {architectures!r}; its first entry must be one of "
            f"{', '.join(known)}"
        )
    model_type = text_values(hf_config).get("model_type") if TEXT_CONFIG in hf_config else None
    found = [spec for spec in texts if model_type in (spec.model_type, None)]
    if len(found) != 1:
        raise ValueError(
            f"the model's config.json has {TEXT_CONFIG} with model_type: {model_type!r}; that of a {name} must be one "
            f"of {', '.join(sorted(spec.model_type for spec in texts))}"
        )
    return llava.spec_over(found[0]) if is_composed else spec_within(found[0], name)
