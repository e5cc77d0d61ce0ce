"""Checks that stop a run before its first step if its data trains no tokens or the wrong ones, or loses too many.

The counts themselves are defined in receipt.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xorl.data.chunks import Chunk
from xorl.data.errors import DataError
from xorl.data.formats import EncodedDocuments, Format, TextTokenizer, id_problem
from xorl.data.receipt import Counts, Findings

logger = logging.getLogger(__name__)

# A few samples without trained tokens are harmless; more than this indicates a wrong mask or a missing label column.
_UNTRAINED_LIMIT = 0.01
# The limit for samples whose prompt is trained although only the answer should be.
_ALL_TRAINED_LIMIT = 0.01
# The limit for samples whose labels differ from the tokens at the same positions.
_MISALIGNED_LIMIT = 0.01
# The fraction that may overflow without an explicit limit. Above it, the length is probably set too short.
_OVERFLOW_LIMIT = 0.01
_SPECIAL = ("bos", "eos", "pad")
# How many tokens a message lists.
_MAX_TOKENS = 5


@dataclass(frozen=True)
class Limits:
    """How much an entry may lose. `explicit_limit`: the entry sets max_seq_len, so truncation is intended.

    `overflow_fraction` (overflow_limit) of the samples and of the tokens may overflow; None means the default.
    `skipped_fraction` (skip_bad_rows) of the samples may be skipped; None means that rows are not skipped.
    """

    explicit_limit: bool = False
    overflow_fraction: float | None = None
    skipped_fraction: float | None = None


def validate_counts(counts: Counts, name: str, fmt: Format, option: str, limits: Limits, *, strict: bool) -> None:
    """Runs check_counts and warn_of_counts. Without `strict`, logs the error that would stop a run.

    Raises DataError in any case if there are no documents.
    """
    try:
        check_counts(counts, name, fmt, option, limits)
    except DataError as error:
        if strict or not counts.documents:
            raise
        logger.warning("this would stop a run: %s", error)
    warn_of_counts(counts, name)


def check_counts(counts: Counts, name: str, fmt: Format, option: str, limits: Limits) -> None:
    """Raises DataError if the counts of the dataset `name`, configured at `option`, are implausible."""
    if counts.samples == 0:
        raise DataError(f"{option}: {name} is empty: it has no samples")
    check_skipped(counts, name, option, limits)
    if counts.documents == 0:
        raise DataError(
            f"{option}: {name} has no documents: of {counts.samples} samples {counts.dropped} are longer than "
            f"{fmt.limit_option} = {fmt.limit} (overflow: {fmt.overflow}), {counts.empty} are empty and "
            f"{counts.skipped} cannot be used"
        )
    _check_trained(counts, name, fmt, option, limits)
    _check_overflow(counts, name, fmt, option, limits)
    if fmt.masks_prompts and counts.all_trained > _ALL_TRAINED_LIMIT * counts.samples:
        raise DataError(
            f"{option}: in {counts.all_trained} of the {counts.samples} samples of {name} every token is trained, the "
            f"prompt included, more than {_ALL_TRAINED_LIMIT:.0%}. Look at the data with `xorl data inspect`; if this "
            f"is intended, set {option}.train_on: all"
        )
    if counts.misaligned > _MISALIGNED_LIMIT * counts.samples:
        shifted = 2 * counts.shifted >= counts.misaligned
        problem = (
            "equal the next token: they are already shifted, which training does itself"
            if shifted
            else "differ from the token at the same position"
        )
        raise DataError(
            f"{option}: in {counts.misaligned} of the {counts.samples} samples of {name} most labels {problem}. "
            "Provide labels that are aligned with input_ids (-100 where a token is not trained), or ignore the column "
            'with columns=["input_ids"]'
        )


def check_skipped(counts: Counts, name: str, option: str, limits: Limits) -> None:
    """Raises DataError if more rows were skipped than the entry allows."""
    limit = limits.skipped_fraction
    if limit is not None and counts.skipped > limit * counts.samples:
        raise DataError(
            f"{option}: {counts.skipped} of the {counts.samples} samples of {name} cannot be used, more than "
            f"{limit:.2%}, the limit of {option}.skip_bad_rows. Fix them (the log names the first ones), or raise the "
            "limit"
        )


def log_findings(findings: Findings, counts: Counts, name: str, skipped_fraction: float | None) -> None:
    """Logs the columns, message keys and skipped rows that do not affect the documents of a dataset."""
    if findings.unused:
        logger.info("%s: columns and message keys that are not used: %s", name, ", ".join(findings.unused))
    for problem in findings.problems:
        logger.warning("prepare dataset=%s skipped: %s", name, problem)
    if counts.skipped:
        line = "prepare dataset=%s skipped_rows=%d of=%d limit=%.2f%%: they cannot be used (skip_bad_rows)"
        logger.warning(line, name, counts.skipped, counts.samples, 100 * (skipped_fraction or 0))


def warn_of_counts(counts: Counts, name: str) -> None:
    """Logs unusual counts that do not stop a run."""
    if counts.untrained:
        logger.warning("prepare dataset=%s untrained_samples=%d%s", name, counts.untrained, _why_untrained(counts))
    if counts.unwritten_reasoning:
        logger.warning(
            "prepare dataset=%s unwritten_reasoning=%d: the template omits the reasoning of these conversations",
            name,
            counts.unwritten_reasoning,
        )
    if counts.unended_turns:
        logger.warning(
            "prepare dataset=%s unended_turns=%d: the template writes no special token after these turns, so the model "
            "does not learn to stop there",
            name,
            counts.unended_turns,
        )


def _why_untrained(counts: Counts) -> str:
    reasons = [
        f"{number} of them {reason}"
        for number, reason in (
            (counts.untrained_by_overflow, "lost theirs when they were cut to length"),
            (counts.empty, "are empty"),
        )
        if number
    ]
    return f" ({', '.join(reasons)})" if reasons else ""


def _check_trained(counts: Counts, name: str, fmt: Format, option: str, limits: Limits) -> None:
    why = _why_untrained(counts)
    if counts.trained_tokens == 0:
        raise DataError(
            f"{option}: no token of {name} is trained: none of its {counts.samples} samples has a label other than "
            f"-100 after its first token{why}"
        )
    unexplained = counts.untrained - (counts.untrained_by_overflow if limits.explicit_limit else 0)
    if unexplained > _UNTRAINED_LIMIT * counts.samples:
        remedies = ["Remove these samples, or check how the labels are computed"]
        if counts.untrained_by_overflow:
            remedies.append(f"raise {fmt.limit_option} ({fmt.limit})")
            remedies.append(f"if truncation is intended, set {option}.max_seq_len")
        raise DataError(
            f"{option}: {counts.untrained} of the {counts.samples} samples of {name} have no trained token{why}, "
            f"more than {_UNTRAINED_LIMIT:.0%}. {'; '.join(remedies)}"
        )


def _check_overflow(counts: Counts, name: str, fmt: Format, option: str, limits: Limits) -> None:
    limit = limits.overflow_fraction
    if limit is None:
        # Truncation to an explicit length is intended; splitting loses no tokens if every token is trained.
        truncation = fmt.overflow == "truncate" and limits.explicit_limit
        is_plain = fmt.overflow == "split" and counts.trained_tokens >= counts.tokens - counts.documents
        limit = 1.0 if truncation or is_plain else _OVERFLOW_LIMIT
    touched = counts.truncated + counts.dropped + counts.split
    tokens, total = counts.lost_tokens + counts.split_tokens, counts.tokens + counts.lost_tokens
    if touched <= limit * counts.samples and tokens <= limit * total:
        return
    verb, effect = {
        "truncate": ("cut", "lost"),
        "drop": ("dropped", "lost"),
        "split": ("split", "separated"),
    }[fmt.overflow]
    truncate_hint = f"set {option}.max_seq_len if truncation is intended, or "
    raise DataError(
        f"{option}: {touched} of the {counts.samples} samples of {name} are longer than {fmt.limit_option} = "
        f"{fmt.limit} and would be {verb}, and {tokens} of {total} tokens {effect}: more than {limit:.2%}. "
        f"Raise the length; or {truncate_hint if fmt.overflow == 'truncate' and not limits.explicit_limit else ''}set "
        f"{option}.overflow_limit to the fraction you accept"
    )


def check_extras(columns: Sequence[tuple[str, tuple[str, ...]]]) -> None:
    """Raises DataError unless all entries (option, per-token columns) have the same extras, as batches require."""
    for option, names in columns:
        if names != columns[0][1]:
            (without, _), (having, extra) = sorted(((option, names), columns[0]), key=lambda pair: len(pair[1]))
            raise DataError(
                f"columns: {having} has the per-token columns {', '.join(extra)}, and {without} does not; "
                "deselect them, or add them to every dataset"
            )


def check_largest_id(largest: tuple[int, int], name: str, fmt: Format) -> None:
    """Raises DataError if `largest`, the largest id and its row, is outside the vocabulary."""
    if fmt.vocab_size is not None and largest[0] >= fmt.vocab_size:
        raise DataError(f"{name}, row {largest[1]} (the first is 0): {_id_problem(largest[0], fmt)}")


def _id_problem(largest: int, fmt: Format) -> str:
    if fmt.tokenizer is None or fmt.vocab_size is None:
        return id_problem(largest, "a sample", fmt.vocab_size)
    return (
        f"the tokenizer writes {fmt.tokenizer.core.id_to_token(largest)!r} as id {largest}, but the model's vocab_size "
        f"is {fmt.vocab_size}, so the largest id is {fmt.vocab_size - 1}. {_tokens_without_rows(fmt)}. If tokens were "
        "added for this model, give it rows for them with transformers, model.resize_token_embeddings(len(tokenizer)), "
        "save it, and train from that folder; otherwise use the model's own tokenizer"
    )


def _tokens_without_rows(fmt: Format) -> str:
    """Name the tokens beyond the vocabulary of the model; "" if there are none."""
    if fmt.tokenizer is None or fmt.vocab_size is None:
        return ""
    tokens = fmt.tokenizer.core.get_vocab(with_added_tokens=True)
    beyond = sorted((number, token) for token, number in tokens.items() if number >= fmt.vocab_size)
    if not beyond:
        return ""
    shown = [f"{token} ({number})" for number, token in beyond[:_MAX_TOKENS]]
    shown += [f"{len(beyond) - _MAX_TOKENS} more"] * (len(beyond) > _MAX_TOKENS)
    return (
        f"The tokenizer in {fmt.tokenizer.folder} has {len(tokens)} tokens and the model {fmt.vocab_size} rows in its "
        f"embeddings and its head, none of them for {', '.join(shown)}"
    )


def check_ids(encoded: EncodedDocuments, chunk: Chunk, fmt: Format) -> None:
    """Raises DataError if a chunk contains an id outside the vocabulary."""
    if fmt.vocab_size is not None and encoded.largest_id >= fmt.vocab_size:
        location = chunk.location(encoded.largest_id_row)
        raise DataError(f"{location}: {_id_problem(encoded.largest_id, fmt)}")


def special_ids(hf_config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """The special token ids in a model's config.json: one or several per name; names that are not set are missing."""
    found: dict[str, tuple[int, ...]] = {}
    for name in _SPECIAL:
        value = hf_config.get(f"{name}_token_id")
        values = value if isinstance(value, list) else [value]
        ids = tuple(item for item in values if isinstance(item, int) and item >= 0)
        if ids:
            found[name] = ids
    return found


def check_special_ids(ids: Mapping[str, Sequence[int]]) -> None:
    """Raises DataError unless these can be the result of `special_ids`."""
    for name, values in ids.items():
        if name not in _SPECIAL:
            raise DataError(f"model_special_ids: {name!r} is not one of {', '.join(_SPECIAL)}")
        if not isinstance(values, (tuple, list)) or not all(type(value) is int for value in values):
            raise DataError(f"model_special_ids: {name}: {values!r}, want a tuple of int, such as (2,)")


def check_tokenizer(fmt: Format, model: Mapping[str, tuple[int, ...]], name: str) -> None:
    """Check the tokenizer of the dataset `name`, if any, against the model's special ids and its vocabulary.

    Raises DataError for different special tokens. Tokens beyond the vocabulary are a warning, since data may lack them.
    """
    if fmt.tokenizer is not None:
        _check_special_tokens(fmt.tokenizer, model)
    if problem := _tokens_without_rows(fmt):
        logger.warning("prepare dataset=%s: %s: text with these tokens cannot be trained or generated", name, problem)


def _check_special_tokens(tokenizer: TextTokenizer, model: Mapping[str, tuple[int, ...]]) -> None:
    """Raises DataError if the tokenizer and config.json name different special tokens.

    With different tokens the model would never stop, or start with a token it does not know. A token that only one of
    them sets is not a conflict.
    """
    for name in _SPECIAL:
        tokenizer_id, wanted = tokenizer.id_of(f"{name}_token"), model.get(name)
        if tokenizer_id is None or not wanted or tokenizer_id in wanted:
            continue
        shown = wanted[0] if len(wanted) == 1 else list(wanted)
        raise DataError(
            f"tokenizer_folder: the {name}_token of the tokenizer in {tokenizer.folder} is "
            f"{tokenizer.special[f'{name}_token']!r}, id {tokenizer_id}, but the model's config.json has "
            f"{name}_token_id {shown} ({', '.join(repr(tokenizer.core.id_to_token(token)) for token in wanted)}). Use "
            f"the model's tokenizer, or set {name}_token_id to the tokenizer's id in a copy of the config.json"
        )
