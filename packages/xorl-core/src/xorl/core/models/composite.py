"""Composite models: a text model, which trains, inside a model that has further parts, such as a vision tower.

Their config.json has the text model's keys in a mapping of their own, and their checkpoints have its tensors under a
prefix. Exports copy the tensors of the other parts.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial

from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.spec import ModelSpec

TEXT_CONFIG = "text_config"
# Embeddings and head are tied as the composite says; its text model's own entry only counts without one.
_TIED = "tie_word_embeddings"
_PREFIX = "model.language_model."
# Earlier releases of transformers had the text model's head inside it. Files still have these names.
_SPELLINGS = {"language_model.model.": _PREFIX, "language_model.lm_head.": "lm_head."}


@cache
def spec_within(text: ModelSpec, architecture: str) -> ModelSpec:
    """The spec of a composite model of this architecture, of which `text` is the text model."""
    names = replace(
        text.checkpoint_names,
        prefix=_PREFIX,
        embedding=_PREFIX + text.checkpoint_names.embedding.removeprefix(text.checkpoint_names.prefix),
        is_part=True,
        spellings=_SPELLINGS,
    )
    config_from_hf = partial(_read_text, text)
    return replace(text, architecture=architecture, config_from_hf=config_from_hf, checkpoint_names=names)


def _read_text(text: ModelSpec, values: Mapping[str, object]) -> DecoderConfig:
    try:
        return text.config_from_hf(text_values(values))
    except ValueError as error:
        raise ValueError(f"{TEXT_CONFIG}: {error}") from error


def text_values(hf_config: Mapping[str, object]) -> Mapping[str, object]:
    """The keys of the text model in a config.json: those of `text_config`, or all if it is no composite's."""
    text = hf_config.get(TEXT_CONFIG)
    if not isinstance(text, Mapping):
        return hf_config
    return text if hf_config.get(_TIED) is None else {**text, _TIED: hf_config[_TIED]}


def with_entries(hf_config: Mapping[str, object], entries: Mapping[str, object]) -> dict[str, object]:
    """A config.json with `entries` replacing or extending the keys of its text model."""
    text = hf_config.get(TEXT_CONFIG)
    if not isinstance(text, Mapping):
        return {**hf_config, **entries}
    outer = {key: value for key, value in entries.items() if key in hf_config or key == _TIED}
    inner = {key: value for key, value in entries.items() if key in text or key not in outer}
    return {**hf_config, **outer, TEXT_CONFIG: {**text, **inner}}


def special_tokens(hf_config: Mapping[str, object]) -> Mapping[str, object]:
    """The ids of special tokens in a config.json, by key. Those of a composite come before those of its text model."""
    found = {**text_values(hf_config), **{key: value for key, value in hf_config.items() if value is not None}}
    return {key: value for key, value in found.items() if key.endswith("_token_id")}
