"""Composes a language model with an image encoder in another folder (`model.encoders`): one model, two sets of weights.

The result is a model like any other. Its exports are single folders, which need no `model.encoders`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from xorl.ckpt import CheckpointError, SafetensorsSource, WeightSource
from xorl.config.local import ModelConfig
from xorl.core.models import PLACEHOLDER_KEY, ComposedWeights, composed_config, spec_for
from xorl.core.models.composite import TEXT_CONFIG
from xorl.core.models.recipes import ENCODER
from xorl.data import DataError
from xorl.data.formats import load_tokenizer
from xorl.data.images import read_processor
from xorl.lora.prequantized import QUANTIZATION_KEY
from xorl.train.architecture import CONFIG_PATTERNS, Architecture, EncoderParts, folder_of, read_object

OPTION = "model.encoders.image"
# The prefix of the native names of the projector, which no folder has.
_PROJECTOR = f"{ENCODER}projector."
# The text of the token that stands for images, unless model.foundation names another one.
_TOKEN = "<image>"


def composed(architecture: Architecture, config: ModelConfig) -> Architecture:
    """The architecture of `architecture`, a language model, with the encoder that `model.encoders` names.

    Raises ValueError if the two cannot be composed, or if the tokenizer has no token that stands for images.
    """
    encoder = config.encoders["image"]
    path = encoder.config_path or encoder.model_path
    assert path is not None, "the configuration was checked"
    if architecture.config.images is not None or TEXT_CONFIG in architecture.hf_config:
        raise ValueError(
            f"{OPTION}: {path}, but a {architecture.spec.architecture} has its own image encoder; leave model.encoders "
            "at {}, or start from a language model alone"
        )
    if QUANTIZATION_KEY in architecture.hf_config:
        raise ValueError(f"{OPTION}: the weights of the language model are quantised; start from those that are not")
    option = f"{OPTION}.{'config_path' if encoder.config_path else 'model_path'}"
    folder = folder_of(option, path, CONFIG_PATTERNS)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{option}: {folder} holds no config.json")
    given = config.foundation.get(PLACEHOLDER_KEY)
    token, placeholder = _placeholder(architecture, given if isinstance(given, int) else None)
    encoder_config = read_object(option, folder / "config.json")
    try:
        hf_config = composed_config(architecture.hf_config, encoder_config, placeholder)
        spec = spec_for(hf_config)
        shape = spec.config_from_hf(hf_config)
        processor, _ = read_processor(folder)
    except (ValueError, DataError) as error:
        raise ValueError(f"{option}: {folder}: {error}") from error
    if placeholder >= shape.vocab_size:
        raise ValueError(
            f"{OPTION}: the token {token} has the id {placeholder}, but the model has only {shape.vocab_size} tokens; "
            f"name an unused one in model.foundation: {{{PLACEHOLDER_KEY}: ID}}"
        )
    parts = EncoderParts(encoder.model_path, processor, token)
    return replace(architecture, spec=spec, config=shape, hf_config=hf_config, encoder=parts)


def _placeholder(architecture: Architecture, given: int | None) -> tuple[str, int]:
    """The text and the id of the token that stands for images."""
    folder = architecture.tokenizer_folder
    if folder is None:
        raise ValueError(f"{OPTION}: the model has no tokenizer; name its folder in model.tokenizer_path")
    core = load_tokenizer(folder).core
    text = _TOKEN if given is None else core.id_to_token(given)
    found = core.token_to_id(_TOKEN) if given is None else given
    if found is None or text is None:
        missing = f"no token {_TOKEN}" if given is None else f"no token with the id {given}"
        raise ValueError(
            f"{OPTION}: the tokenizer in {folder} has {missing}, which has to stand for images: add it with "
            f'transformers\' tokenizer.add_tokens("{_TOKEN}", special_tokens=True), save the tokenizer to another '
            "folder, and name that in model.tokenizer_path; or name the id of an unused token in "
            f"model.foundation: {{{PLACEHOLDER_KEY}: ID}}"
        )
    return text, found


def composed_weights(
    architecture: Architecture, text_path: str | None, names: Collection[str]
) -> tuple[WeightSource, Collection[str]]:
    """The stored weights of a composition, and those of the native `names` that are not stored but random.

    text_path: the folder or Hub id of the language model; None: it has random weights.
    """
    assert architecture.encoder is not None, "only compositions have two folders"
    parts, origin = ComposedWeights(), architecture.encoder.origin
    if text_path is not None:
        text = architecture.hf_config[TEXT_CONFIG]
        assert isinstance(text, Mapping), "written by `composed_config`"
        spec = spec_for(text)
        source = SafetensorsSource(folder_of("model.model_path", text_path))
        parts.add_decoder(spec.checkpoint_view(spec.config_from_hf(text), source), spec)
    if origin is not None:
        option = f"{OPTION}.model_path"
        try:
            parts.add_tower(SafetensorsSource(folder_of(option, origin)))
        except CheckpointError as error:
            raise CheckpointError(f"{option}: {error}") from error

    def is_random(name: str) -> bool:
        if name.startswith(ENCODER):
            return name.startswith(_PROJECTOR) or origin is None
        return text_path is None

    view = architecture.spec.checkpoint_view(architecture.config, parts)
    return view, [name for name in names if is_random(name)]
