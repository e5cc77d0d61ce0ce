"""The tokens at which generation stops after training: the model's end tokens, and those learned from the data."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from xorl.data.formats import load_tokenizer
from xorl.train.architecture import Architecture

logger = logging.getLogger(__name__)

# A special token that ends a smaller share of the trained texts than this does not count as an end token.
_MIN_SHARE = 0.01
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def end_tokens_of(architecture: Architecture) -> tuple[int, ...]:
    """The tokens at which generation stops: of config.json and generation_config.json, or else the tokenizer's EOS."""
    found = _ids(architecture.special_tokens.get("eos_token_id")) + _ids(architecture.generation.get("eos_token_id"))
    folder = architecture.tokenizer_folder
    if not found and folder is not None and (folder / "tokenizer.json").is_file():
        found += _ids(load_tokenizer(folder).eos_id)
    return tuple(dict.fromkeys(found))


def with_end_tokens(architecture: Architecture, end_tokens: Mapping[str, int]) -> Architecture:
    """The architecture, with the end tokens of the trained text added to its generation_config.json.

    `end_tokens` has the special tokens that end trained text, and how often (Receipt.end_tokens). With a base model, a
    chat template may end turns with a token at which the model's generation would not stop.
    """
    folder = architecture.tokenizer_folder
    total = sum(end_tokens.values())
    frequent = [text for text, number in end_tokens.items() if number >= _MIN_SHARE * total]
    if folder is None or not frequent:
        return architecture
    core = load_tokenizer(folder).core
    ids = {text: core.token_to_id(text) for text in frequent}
    generation, special = dict(architecture.generation), architecture.special_tokens
    if not generation:
        # Without generation_config.json, transformers takes these from config.json.
        generation = {name: special[name] for name in _SPECIAL if special.get(name) is not None}
    stops = _ids(generation.get("eos_token_id", special.get("eos_token_id")))
    missing = {text: token_id for text, token_id in ids.items() if token_id is not None and token_id not in stops}
    if not missing:
        return architecture
    logger.info(
        "The model stops at %s, but its trained text ends with %s: eos_token_id in the exported "
        "generation_config.json has %s, too",
        ", ".join(f"{core.id_to_token(each)} ({each})" for each in stops) or "no token",
        ", ".join(f"{text} ({token_id})" for text, token_id in missing.items()),
        "this token" if len(missing) == 1 else "these tokens",
    )
    # With this mark, transformers may take the values of config.json instead.
    generation.pop("_from_model_config", None)
    generation["eos_token_id"] = [*stops, *missing.values()]
    return replace(architecture, generation=generation, own_generation=True)


def _ids(value: object) -> list[int]:
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)]
