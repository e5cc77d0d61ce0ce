"""The checks that stop a run before its first step: data that trains on nothing, on the wrong tokens, or loses parts.

receipt.py counts; this file judges the counts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xorl.data.errors import DataError
from xorl.data.formats import EncodedDocuments, Format, TextTokenizer, id_problem
from xorl.data.readers import Piece
from xorl.data.receipt import Counts

logger = logging.getLogger(__name__)

# A few samples without any trained token are waste; more than this indicates a wrong mask or a missing label column.
_UNTRAINED_LIMIT = 0.01
# The same for samples whose prompt is trained although only the answer should be.
_ALL_TRAINED_LIMIT = 0.01
# The same for samples whose labels differ from their own tokens.
_MISALIGNED_LIMIT = 0.01
# The share that may overflow without an explicit limit: beyond it, a length that is too short is more likely than odd
# rows.
_OVERFLOW_LIMIT = 0.01
_SPECIAL = ("bos", "eos", "pad")


@dataclass(frozen=True)
class Allowed:
    """The losses that an entry allows: `explicit_limit` says that max_seq_len was set on purpose.

    `overflow_fraction` (overflow_limit) of the samples and of the tokens may overflow; None is the default.
    """

    explicit_limit: bool = False
    overflow_fraction: float | None = None


def judge(counts: Counts, name: str, form: Format, option: str, allowed: Allowed, *, stops: bool) -> None:
    """Runs check_counts and warn_of_counts. Without `stops`, logs what would stop a run instead of raising.

    Still raises DataError if nothing is left to look at.
    """
    try:
        check_counts(counts, name, form, option, allowed)
    except DataError as error:
        if stops or not counts.documents:
            raise
        logger.warning("this stops a run: %s", error)
    warn_of_counts(counts, name)


def check_counts(counts: Counts, name: str, form: Format, option: str, allowed: Allowed) -> None:
    """Raises DataError for counts that cannot be intended, of the dataset `name` at `option`."""
    if counts.samples == 0:
        raise DataError(f"{option}: {name} is empty: it has no samples")
    if counts.documents == 0:
        raise DataError(
            f"{option}: nothing is left of {name}: of {counts.samples} samples {counts.dropped} are longer than "
            f"{form.limit_option} = {form.limit} (overflow: {form.overflow}) and {counts.empty} are empty"
        )
    _check_trained(counts, name, form, option, allowed)
    _check_overflow(counts, name, form, option, allowed)
    if form.masks_prompts and counts.all_trained > _ALL_TRAINED_LIMIT * counts.samples:
        raise DataError(
            f"{option}: in {counts.all_trained} of the {counts.samples} samples of {name} every token is trained, the "
            f"prompt included, more than {_ALL_TRAINED_LIMIT:.0%}. Look at the data with `xorl data inspect`; where "
            f"that is what you want, set {option}.train_on: all"
        )
    if counts.misaligned > _MISALIGNED_LIMIT * counts.samples:
        shifted = 2 * counts.shifted >= counts.misaligned
        what = "are the tokens after their places: they were shifted already, which training does itself"
        raise DataError(
            f"{option}: in {counts.misaligned} of the {counts.samples} samples of {name} most labels "
            f"{what if shifted else 'are not the tokens at their places'}. Give labels that are aligned with input_ids "
            "(-100 where a token is not trained), or leave the column out by data.select_columns: [input_ids]"
        )


def warn_of_counts(counts: Counts, name: str) -> None:
    """Logs what is unusual but does not stop a run."""
    if counts.untrained:
        logger.warning("prepare dataset=%s untrained_samples=%d%s", name, counts.untrained, _why_untrained(counts))
    if counts.unwritten_reasoning:
        logger.warning(
            "prepare dataset=%s unwritten_reasoning=%d: they have reasoning of which the template writes none",
            name,
            counts.unwritten_reasoning,
        )
    if counts.unended_turns:
        logger.warning(
            "prepare dataset=%s unended_turns=%d: the template writes no special token after them, so the model is not "
            "taught to stop there",
            name,
            counts.unended_turns,
        )


def _why_untrained(counts: Counts) -> str:
    reasons = [
        f"{number} of them {what}"
        for number, what in (
            (counts.untrained_by_overflow, "had some before they were cut for length"),
            (counts.empty, "are empty"),
        )
        if number
    ]
    return f" ({', '.join(reasons)})" if reasons else ""


def _check_trained(counts: Counts, name: str, form: Format, option: str, allowed: Allowed) -> None:
    why = _why_untrained(counts)
    if counts.trained_tokens == 0:
        raise DataError(
            f"{option}: no token of {name} is trained: none of its {counts.samples} samples has a label other than "
            f"-100 after its first token{why}"
        )
    unexplained = counts.untrained - (counts.untrained_by_overflow if allowed.explicit_limit else 0)
    if unexplained > _UNTRAINED_LIMIT * counts.samples:
        remedies = ["Remove them, or look at how labels are made"]
        if counts.untrained_by_overflow:
            remedies.append(f"raise {form.limit_option} ({form.limit})")
            remedies.append(f"where cutting is what you want, set {option}.max_seq_len")
        raise DataError(
            f"{option}: {counts.untrained} of the {counts.samples} samples of {name} have no trained token{why}, "
            f"more than {_UNTRAINED_LIMIT:.0%}. {'; '.join(remedies)}"
        )


def _check_overflow(counts: Counts, name: str, form: Format, option: str, allowed: Allowed) -> None:
    limit = allowed.overflow_fraction
    if limit is None:
        # Truncation at an explicit length is intended; splitting loses nothing if every token is trained.
        truncation = form.overflow == "truncate" and allowed.explicit_limit
        is_plain = form.overflow == "split" and counts.trained_tokens >= counts.tokens - counts.documents
        limit = 1.0 if truncation or is_plain else _OVERFLOW_LIMIT
    touched = counts.truncated + counts.dropped + counts.split
    tokens, total = counts.lost_tokens + counts.split_tokens, counts.tokens + counts.lost_tokens
    if touched <= limit * counts.samples and tokens <= limit * total:
        return
    verb, fate = {
        "truncate": ("cut", "lost"),
        "drop": ("dropped", "lost"),
        "split": ("split", "torn apart"),
    }[form.overflow]
    on_purpose = f"set {option}.max_seq_len to cut at it on purpose, or "
    raise DataError(
        f"{option}: {touched} of the {counts.samples} samples of {name} are longer than {form.limit_option} = "
        f"{form.limit} and would be {verb}, and with them {tokens} of {total} tokens {fate}: more than {limit:.2%}. "
        f"Raise the length; or {on_purpose if form.overflow == 'truncate' and not allowed.explicit_limit else ''}set "
        f"{option}.overflow_limit to the fraction you accept"
    )


def check_extras(columns: Sequence[tuple[str, tuple[str, ...]]]) -> None:
    """Raises DataError unless all entries (option, per-token columns) have the same extras: a batch needs all."""
    for option, names in columns:
        if names != columns[0][1]:
            (poor, _), (rich, extra) = sorted(((option, names), columns[0]), key=lambda pair: len(pair[1]))
            raise DataError(
                f"data.select_columns: {', '.join(extra)}, one number per token, are there for {rich} and not for "
                f"{poor}, whose tokens would have none; leave them out, or give every dataset such columns"
            )


def check_largest_id(largest: tuple[int, int], name: str, vocab_size: int | None) -> None:
    """Raises DataError if (largest id, its row) is outside the vocabulary."""
    if vocab_size is not None and largest[0] >= vocab_size:
        raise DataError(f"{name}, row {largest[1]} (the first is 0): {id_problem(largest[0], 'a sample', vocab_size)}")


def check_ids(encoded: EncodedDocuments, piece: Piece, form: Format) -> None:
    """Raises DataError if a piece has an id outside the vocabulary."""
    if form.vocab_size is not None and encoded.largest_id >= form.vocab_size:
        place = piece.place(encoded.largest_id_row)
        raise DataError(f"{place}: {id_problem(encoded.largest_id, 'a sample', form.vocab_size)}")


def special_ids(hf_config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """The special token ids in a model's config.json: one or several for each name, none if it does not set it."""
    found: dict[str, tuple[int, ...]] = {}
    for name in _SPECIAL:
        value = hf_config.get(f"{name}_token_id")
        values = value if isinstance(value, list) else [value]
        ids = tuple(item for item in values if isinstance(item, int) and item >= 0)
        if ids:
            found[name] = ids
    return found


def check_special_tokens(tokenizer: TextTokenizer, model: Mapping[str, tuple[int, ...]]) -> None:
    """Raises DataError if tokenizer and config.json name different special tokens.

    The model would never stop, or begin with a token it does not know. A token that one of them does not set is no
    conflict.
    """
    for name in _SPECIAL:
        own, wanted = tokenizer.id_of(f"{name}_token"), model.get(name)
        if own is None or not wanted or own in wanted:
            continue
        shown = wanted[0] if len(wanted) == 1 else list(wanted)
        raise DataError(
            f"model.tokenizer_path: the {name}_token of the tokenizer in {tokenizer.folder} is "
            f"{tokenizer.special[f'{name}_token']!r}, id {own}, but the model's config.json says {name}_token_id "
            f"{shown} ({', '.join(repr(tokenizer.core.id_to_token(token)) for token in wanted)}). Use the model's own "
            f"tokenizer, or set {name}_token_id to what the data is to use in a copy of config.json (model.config_path)"
        )
