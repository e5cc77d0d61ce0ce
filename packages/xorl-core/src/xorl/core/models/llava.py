"""LLaVA 1.5: any decoder, the tower of CLIP or SigLIP, and a projector of two layers between them.

A language model and an image encoder in separate folders are combined into this architecture.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType

import torch
from torch import Tensor

from xorl.core.models.composite import TEXT_CONFIG, spec_within, text_values
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.image_config import ImageConfig
from xorl.core.models.recipes import WeightSource
from xorl.core.models.spec import ModelSpec

ARCHITECTURE = "LlavaForConditionalGeneration"
# The modules of the decoder, of a tower and of the projector, as transformers names them.
_DECODER = "model.language_model."
TOWER, PROJECTOR = "model.vision_tower.", "model.multi_modal_projector."
_BLOCK, _ITS_BLOCK = "encoder.blocks.{}.", TOWER + "encoder.layers.{}."
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "encoder.patches": TOWER + "embeddings.patch_embedding",
        "encoder.positions": TOWER + "embeddings.position_embedding",
        "encoder.class_token": TOWER + "embeddings",
        "encoder.norm": TOWER + "pre_layrnorm",
        _BLOCK + "norm1": _ITS_BLOCK + "layer_norm1",
        _BLOCK + "norm2": _ITS_BLOCK + "layer_norm2",
        _BLOCK + "attention.q_proj": _ITS_BLOCK + "self_attn.q_proj",
        _BLOCK + "attention.k_proj": _ITS_BLOCK + "self_attn.k_proj",
        _BLOCK + "attention.v_proj": _ITS_BLOCK + "self_attn.v_proj",
        _BLOCK + "attention.out": _ITS_BLOCK + "self_attn.out_proj",
        _BLOCK + "mlp.up_proj": _ITS_BLOCK + "mlp.fc1",
        _BLOCK + "mlp.down_proj": _ITS_BLOCK + "mlp.fc2",
        "encoder.projector.up": PROJECTOR + "linear_1",
        "encoder.projector.down": PROJECTOR + "linear_2",
    }
)
# What follows the layer whose features are used. The first group is the number of a block of the tower.
_UNUSED = rf"{re.escape(TOWER)}(?:encoder\.layers\.(?P<block>\d+)\.|post_layernorm\.|head\.)"
_IGNORED = rf"^{re.escape(TOWER)}embeddings\.position_ids$"
_SPELLINGS: Mapping[str, str] = MappingProxyType(
    {
        "model.vision_tower.vision_model.": TOWER,
        "vision_tower.vision_model.": TOWER,
        "vision_tower.": TOWER,
        "multi_modal_projector.": PROJECTOR,
    }
)
# By model_type of a tower: its activation and eps if config.json has none, which of its features are used, and whether
# it has a class token.
_TOWERS: Mapping[str, tuple[str, float, str, bool]] = MappingProxyType(
    {
        "clip_vision_model": ("quick_gelu", 1e-5, "default", True),
        "siglip_vision_model": ("gelu_pytorch_tanh", 1e-6, "full", False),
    }
)
# Keys of towers that only concern parts of them that are not used, or training from scratch.
_INERT = ("projection_dim", "vision_use_head", "initializer_factor", "initializer_range", "vocab_size")
# Keys that early files repeat from the decoder, or that concern labels.
_OF_TEXT = ("vocab_size", "ignore_index")
DEFAULT_LAYER = -2
# The key with the id of the token that stands for images.
PLACEHOLDER_KEY = "image_token_index"
# The prefix of the tower's tensors in files of a larger model, which has other parts.
_IN_LARGER = "vision_model."


@cache
def spec_over(text: ModelSpec) -> ModelSpec:
    """The spec of models whose decoder is of the family `text`."""
    inner = spec_within(text, ARCHITECTURE)
    names, text_names = inner.checkpoint_names, text.checkpoint_names
    unused = _UNUSED if text_names.unused is None else f"{_UNUSED}|(?:{text_names.unused})"
    return replace(
        inner,
        model_type="llava",
        config_from_hf=partial(_read, text),
        checkpoint_names=replace(
            names,
            is_part=False,
            encoder=NAMES,
            unused=unused,
            ignored=f"{_IGNORED}|{names.ignored}",
            spellings={**names.spellings, **_SPELLINGS},
        ),
    )


def _read(text: ModelSpec, values: Mapping[str, object]) -> DecoderConfig:
    hf = HFConfig(values, ARCHITECTURE)
    for key in (TEXT_CONFIG, "tie_word_embeddings", "image_seq_length"):
        hf.has(key)
    config = _read_decoder(text, hf, text_values(values))
    config = replace(config, images=_read_images(hf, config.hidden_size))
    hf.finish(inert=_OF_TEXT)
    return config


def _read_decoder(text: ModelSpec, hf: HFConfig, inner: Mapping[str, object]) -> DecoderConfig:
    try:
        config = text.config_from_hf(inner)
    except ValueError as error:
        raise ValueError(f"{TEXT_CONFIG}: {error}") from error
    reason = None
    if text.make_recipes is not None or config.learned_positions or config.images is not None:
        reason = "it has learned positions, or an encoder of its own"
    # transformers applies the first to features of images too, and the others not at all.
    elif inner.get("embedding_multiplier") not in (None, 1) or config.logit_scale != 1 or config.logit_softcap:
        reason = "other programs would not scale or cap its embeddings or logits in a composition as it does alone"
    if reason is not None:
        raise ValueError(f"{hf.architecture}: {TEXT_CONFIG}: a {text.architecture} is not supported: {reason}")
    return config


def _read_images(hf: HFConfig, out_width: int) -> ImageConfig:
    vision = hf.nested("vision_config")
    kind = vision.expect("model_type", vision.get("model_type", str, "clip_vision_model"), _TOWERS)
    activation, eps, strategy, has_class = _TOWERS[kind]
    chosen = hf.get("vision_feature_select_strategy", str, "default")
    hf.expect("vision_feature_select_strategy", chosen, [strategy])
    num_layers = vision.positive("num_hidden_layers", 12)
    vision.expect("num_channels", vision.positive("num_channels", 3), [3])
    patch_size, image_size = vision.positive("patch_size"), vision.positive("image_size")
    images = ImageConfig(
        placeholder=hf.get(PLACEHOLDER_KEY, int, hf.get("image_token_id", int, 32000)),
        patch_size=patch_size,
        frames=1,
        merge_size=1,
        width=vision.positive("hidden_size", 768),
        num_heads=vision.positive("num_attention_heads", 12),
        mlp_width=vision.positive("intermediate_size", 3072),
        activation=vision.activation("hidden_act", activation),
        num_blocks=_num_blocks(hf, num_layers),
        side=image_size // patch_size,
        rope_theta=None,
        out_width=out_width,
        taps=(),
        eps=vision.above_zero("layer_norm_eps", eps),
        patch_bias=not has_class,
        class_token=has_class,
        projector_activation=hf.activation("projector_hidden_act", "gelu"),
        projector_bias=hf.get("multimodal_projector_bias", bool, True),
    )
    vision.warn_about_dropout()
    vision.finish(inert=_INERT)
    return images


def _num_blocks(hf: HFConfig, num_layers: int) -> int:
    """How many blocks compute the features of `vision_feature_layer`, among the inputs and outputs of all."""
    layer = hf.get("vision_feature_layer", int, DEFAULT_LAYER)
    number = layer if layer >= 0 else num_layers + 1 + layer
    if not 1 <= number <= num_layers:
        raise ValueError(
            f"{hf.architecture}: vision_feature_layer: {layer}, want the output of one of the {num_layers} layers of "
            f"the tower: 1 to {num_layers}, or -{num_layers} to -1"
        )
    return number


def composed_config(
    text: Mapping[str, object], encoder: Mapping[str, object], placeholder: int | None
) -> dict[str, object]:
    """The config.json of a model with the decoder `text` and the tower of `encoder`, both their config.json.

    encoder: of the tower alone, or of a model that has it in `vision_config`. placeholder: the id of the token that
    stands for images, if known. Raises ValueError for others.
    """
    vision = encoder.get("vision_config")
    tower = vision if isinstance(vision, Mapping) else encoder
    kind = tower.get("model_type")
    if kind not in _TOWERS:
        # Some files have only the model_type of the whole model.
        outer = f"{encoder.get('model_type')}_vision_model"
        if outer not in _TOWERS:
            raise ValueError(f"model_type: {kind!r} is not an image encoder that is supported: {', '.join(_TOWERS)}")
        kind = outer
    if TEXT_CONFIG in text:
        raise ValueError(f"{text.get('architectures')} is a model of several parts, not a language model alone")
    dropped = ("architectures", "dtype", "torch_dtype", "transformers_version")
    tower = {key: value for key, value in tower.items() if key not in dropped}
    image_size, patch_size = (tower.get(name) for name in ("image_size", "patch_size"))
    if not isinstance(image_size, int) or not isinstance(patch_size, int) or not 0 < patch_size <= image_size:
        raise ValueError(
            f"image_size: {image_size!r}, patch_size: {patch_size!r}, want the pixels on a side of the tower's images "
            "and of its patches"
        )
    side = image_size // patch_size
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llava",
        **({} if placeholder is None else {PLACEHOLDER_KEY: placeholder}),
        "image_seq_length": side**2,
        "multimodal_projector_bias": True,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": DEFAULT_LAYER,
        "vision_feature_select_strategy": _TOWERS[str(kind)][2],
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        TEXT_CONFIG: {key: value for key, value in text.items() if key not in dropped[1:]},
        "vision_config": {**tower, "model_type": kind},
    }


def processor_config(hf_config: Mapping[str, object], token: str) -> dict[str, object]:
    """The processor_config.json of a composition with this config.json; `token` is the text that stands for images."""
    vision = hf_config["vision_config"]
    assert isinstance(vision, Mapping), "written by `composed_config`"
    return {
        "processor_class": "LlavaProcessor",
        "image_token": token,
        "patch_size": vision["patch_size"],
        "vision_feature_select_strategy": hf_config["vision_feature_select_strategy"],
        "num_additional_image_tokens": int(_TOWERS[str(vision["model_type"])][3]),
    }


class ComposedWeights:
    """A `WeightSource` of the tensors of a language model and of a tower, by their names in the composition of both.

    Both may be missing.
    """

    def __init__(self) -> None:
        self._parts: dict[str, tuple[WeightSource, str]] = {}

    def add_decoder(self, source: WeightSource, spec: ModelSpec) -> None:
        """Add a language model: its weights as `spec.checkpoint_view` returns them."""
        names = spec.checkpoint_names
        for name in source.names():
            whole = name if name == names.head else f"{_DECODER}{name.removeprefix(names.prefix)}"
            self._parts[whole] = source, name

    def add_tower(self, source: WeightSource) -> None:
        """Add the tower in a folder, which may be that of a larger model."""
        is_alone = not any(name.startswith(_IN_LARGER) for name in source.names())
        for name in source.names():
            if is_alone or name.startswith(_IN_LARGER):
                self._parts[TOWER + name.removeprefix(_IN_LARGER)] = source, name

    def names(self) -> Collection[str]:
        return self._parts.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        source, actual = self._parts[name]
        return tuple(source.shape(actual))

    def dtype(self, name: str) -> torch.dtype:
        source, actual = self._parts[name]
        return source.dtype(actual)

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        source, actual = self._parts[name]
        return source.read(actual, start, stop)
