"""Choosing the Format of a dataset entry: checks its options and builds the object that reads its rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from xorl.data.entry import DatasetEntry
from xorl.data.errors import DataError
from xorl.data.formats import (
    SHAPES,
    ChatFormat,
    Format,
    FormatName,
    PromptCompletionFormat,
    TextFormat,
    TextTokenizer,
    TokenizedFormat,
    load_tokenizer,
    recognise,
)
from xorl.data.invariants import Allowed
from xorl.data.readers import Piece

logger = logging.getLogger(__name__)

# The names that `columns` accepts and the values that `train_on` accepts, by type; the first target is the default.
COLUMN_KEYS: dict[FormatName, tuple[str, ...]] = {
    "tokenized": (),
    "chat": ("messages", "tools", "system"),
    "prompt_completion": tuple(name for parts, answer in SHAPES for name in (*parts, answer)),
    "text": ("text",),
}
TARGETS: dict[FormatName, tuple[str, ...]] = {
    "tokenized": (),
    "chat": ("assistant", "last_turn", "all"),
    "prompt_completion": ("completion", "all"),
    "text": ("all",),
}


class Sample(Protocol):
    """The parts of a source that recognising its type needs."""

    def pieces(self, selected: Sequence[str] | None) -> Iterator[Piece]: ...


def allowed_losses(entry: DatasetEntry) -> Allowed:
    """The losses that the options of `entry` allow."""
    return Allowed(explicit_limit=entry.max_seq_len is not None, overflow_fraction=entry.overflow_limit)


def choose_format(
    entry: DatasetEntry,
    *,
    bin_len: int,
    vocab_size: int | None,
    option: str,
    source: Sample | None = None,
    tokenizer_folder: Path | None = None,
) -> Format:
    """The format of `entry`, which stands at `option` in the configuration; `bin_len` is the longest document.

    `source` is read only for type auto; every type but tokenized needs `tokenizer_folder`. Raises DataError for options
    that the type does not have, or for an unusable tokenizer or template.
    """
    kind = _kind(entry, option, source)
    _check_options(entry, kind, option)
    limit = entry.max_seq_len if entry.max_seq_len is not None else bin_len
    limit_option = f"{option}.max_seq_len" if entry.max_seq_len is not None else "data.sample_packing_sequence_len"
    if kind == "tokenized":
        return TokenizedFormat(limit, entry.overflow, limit_option, columns=entry.columns, vocab_size=vocab_size)
    tokenizer = _tokenizer(tokenizer_folder, kind, option)
    columns = dict(entry.column_names)
    if kind == "text":
        if not tokenizer.eos_text:
            logger.warning("prepare dataset=%s: the tokenizer has no eos_token, so documents do not end", entry.path)
        return TextFormat(limit, entry.overflow, limit_option, tokenizer, columns, vocab_size)
    if kind == "prompt_completion":
        train_on = "all" if entry.train_on == "all" else "completion"
        if not tokenizer.eos_text:
            raise DataError(f"model.tokenizer_path: the tokenizer has no eos_token, which ends a {kind} sample")
        return PromptCompletionFormat(limit, entry.overflow, limit_option, tokenizer, train_on, columns, vocab_size)
    target = entry.train_on if entry.train_on in ("last_turn", "all") else "assistant"
    form = ChatFormat(
        limit,
        entry.overflow,
        limit_option,
        tokenizer,
        template=entry.chat_template,
        template_option=f"{option}.chat_template",
        template_kwargs=dict(entry.chat_template_kwargs),
        train_on=target,
        columns=columns,
        vocab_size=vocab_size,
    )
    form.check_template()
    return form


def _kind(entry: DatasetEntry, option: str, source: Sample | None) -> FormatName:
    if entry.type != "auto":
        return entry.type
    if source is None:
        raise DataError(
            f"{option}.type: auto looks at the data, which data.skip_prepare_dataset forbids; name the type that it is"
        )
    rows = next((rows for piece in source.pieces(None) if (rows := piece.rows())), None)
    if rows is None:
        raise DataError(f"{option}: {entry.path} is empty: it has no samples")
    try:
        kind = recognise(rows[0])
    except DataError as error:
        raise DataError(f"{option}.type: auto: {entry.path}: {error}") from error
    logger.info("prepare dataset=%s type=auto recognised=%s columns=%s", entry.path, kind, ",".join(rows[0]))
    return kind


def _check_options(entry: DatasetEntry, kind: FormatName, option: str) -> None:
    if entry.train_on is not None and entry.train_on not in TARGETS[kind]:
        wanted = ", ".join(TARGETS[kind]) or "nothing: labels say it"
        raise DataError(f"{option}.train_on: {entry.train_on} means nothing for type {kind}, which takes {wanted}")
    if entry.chat_template is not None and kind != "chat":
        raise DataError(f"{option}.chat_template: type {kind} has no template; leave it out")
    if entry.chat_template_kwargs and kind != "chat":
        raise DataError(f"{option}.chat_template_kwargs: type {kind} has no template; leave it out")
    unknown = [name for name in entry.column_names if name not in COLUMN_KEYS[kind]]
    if unknown:
        wanted = ", ".join(COLUMN_KEYS[kind]) or "nothing: data.select_columns chooses among token columns"
        raise DataError(f"{option}.columns: {unknown[0]!r} means nothing for type {kind}, which takes {wanted}")
    if kind == "prompt_completion" and entry.column_names:
        shapes = [{*parts, answer} for parts, answer in SHAPES]
        if not any(set(entry.column_names) <= shape for shape in shapes):
            raise DataError(
                f"{option}.columns: {', '.join(entry.column_names)} mix shapes; name prompt and completion, or "
                "instruction, input and output, or question and answer"
            )


def _tokenizer(folder: Path | None, kind: FormatName, option: str) -> TextTokenizer:
    if folder is None:
        raise DataError(f"model.tokenizer_path: {option} is of type {kind}, which needs a tokenizer; name its folder")
    return load_tokenizer(folder)
