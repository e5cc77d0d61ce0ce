"""Chooses the Format of a dataset entry: recognises `type: auto`, checks the options and builds the format."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

from xorl.data.chunks import Chunk, Row
from xorl.data.entry import DatasetEntry
from xorl.data.errors import DataError
from xorl.data.formats import (
    COLUMN_SETS,
    CONTEXT_COLUMNS,
    MESSAGE_COLUMNS,
    SPLIT_COLUMNS,
    ChatFormat,
    Format,
    PreferenceFormat,
    PromptCompletionFormat,
    TextFormat,
    TokenizedFormat,
    holds_messages,
    load_tokenizer,
)
from xorl.data.formats.preference import PREFERENCE_COLUMNS
from xorl.data.images.settings import ImageSettings
from xorl.data.invariants import Limits

logger = logging.getLogger(__name__)

FormatName = Literal["tokenized", "chat", "prompt_completion", "preference", "text"]

# By type: the names that `column_names` maps, and the values that `train_on` accepts. The first target is the default.
COLUMN_KEYS: dict[FormatName, tuple[str, ...]] = {
    "tokenized": (),
    "chat": ("messages", "tools", "system", "images", *SPLIT_COLUMNS),
    "prompt_completion": (*(name for parts, answer in COLUMN_SETS for name in (*parts, answer)), *CONTEXT_COLUMNS),
    "preference": (*PREFERENCE_COLUMNS, "system", "tools"),
    "text": ("text",),
}
TARGETS: dict[FormatName, tuple[str, ...]] = {
    "tokenized": (),
    "chat": ("assistant", "last_turn", "all"),
    "prompt_completion": ("completion", "all"),
    "preference": ("completion",),
    "text": ("all",),
}


class RowSource(Protocol):
    """A source whose rows can be read to recognise their type."""

    def chunks(self, selected: Sequence[str] | None) -> Iterator[Chunk]: ...


def limits_of(entry: DatasetEntry) -> Limits:
    """The losses that the options of `entry` allow."""
    return Limits(entry.max_seq_len is not None, entry.overflow_limit, entry.skip_bad_rows)


def choose_format(
    entry: DatasetEntry,
    *,
    bin_len: int,
    vocab_size: int | None,
    option: str,
    source: RowSource | None = None,
    tokenizer_folder: Path | None = None,
    images: ImageSettings | None = None,
) -> Format:
    """Returns the format of `entry`, whose path in the configuration is `option`; `bin_len` limits document lengths.

    `source` is read only for type auto; every type but tokenized needs `tokenizer_folder`. `images`: how images of
    conversations are read; their files are in `images.root`, or else in the folder of a local dataset. Raises DataError
    for options that the type does not have, or for an unusable tokenizer or template.
    """
    kind = _resolve_type(entry, option, source)
    _check_options(entry, kind, option)
    limit = entry.max_seq_len if entry.max_seq_len is not None else bin_len
    limit_option = f"{option}.max_seq_len" if entry.max_seq_len is not None else "bin_len"
    skip, ignored = entry.skip_bad_rows is not None, tuple(entry.ignore_columns)
    overflow = entry.overflow or ("drop" if kind == "preference" else "truncate")
    if kind == "tokenized":
        return TokenizedFormat(limit, overflow, limit_option, entry.columns, vocab_size, skip, ignored)
    if tokenizer_folder is None:
        raise DataError(f"tokenizer_folder: {option} is of type {kind}, which needs a tokenizer; set its folder")
    tokenizer = load_tokenizer(tokenizer_folder)
    columns = dict(entry.column_names)
    if kind == "text":
        if not tokenizer.eos_text:
            logger.warning(
                "prepare dataset=%s: the tokenizer has no eos_token, so documents have no end token", entry.path
            )
        return TextFormat(limit, overflow, limit_option, tokenizer, columns, vocab_size, skip, ignored)
    if kind in ("prompt_completion", "preference") and not tokenizer.eos_text:
        raise DataError(f"tokenizer_folder: the tokenizer has no eos_token, which {kind} samples end with")
    if kind == "prompt_completion":
        train_on = "all" if entry.train_on == "all" else "completion"
        return PromptCompletionFormat(
            limit, overflow, limit_option, tokenizer, columns, vocab_size, skip, ignored, train_on=train_on
        )
    target = entry.train_on if entry.train_on in ("last_turn", "all") else "assistant"
    chat = ChatFormat(
        limit,
        overflow,
        limit_option,
        tokenizer,
        template=entry.chat_template,
        template_option=f"{option}.chat_template",
        template_kwargs=dict(entry.chat_template_kwargs),
        train_on=target,
        columns={} if kind == "preference" else columns,
        vocab_size=vocab_size,
        skip_bad_rows=skip,
        ignored=ignored,
        images=replace(images, root=images.root or _local_folder(entry)) if images and kind == "chat" else None,
    )
    has_template = kind == "chat" or entry.chat_template is not None or "default" in tokenizer.templates
    if has_template:
        chat.check_template()
    if kind == "chat":
        return chat
    return PreferenceFormat(
        limit,
        overflow,
        limit_option,
        tokenizer,
        columns,
        vocab_size,
        skip,
        ignored,
        chat=chat if has_template else None,
    )


def _local_folder(entry: DatasetEntry) -> Path | None:
    """The folder of a local dataset."""
    path = Path(entry.path).expanduser()
    if path.is_dir():
        return path
    return path.parent if path.is_file() else None


def _resolve_type(entry: DatasetEntry, option: str, source: RowSource | None) -> FormatName:
    if entry.type == "prompt_completion" and source is not None:
        row = _first_row(entry, source, tuple(entry.column_names.get(name, name) for name in SPLIT_COLUMNS))
        if row is not None and _has_split_messages(row, entry.column_names):
            logger.info(
                "prepare dataset=%s type=prompt_completion: its rows are messages, read as type chat", entry.path
            )
            return "chat"
    if entry.type != "auto":
        return entry.type
    if source is None:
        raise DataError(f"{option}.type: auto reads the data, which skip_prepare=True forbids; set the actual type")
    row = _first_row(entry, source, None)
    if row is None:
        raise DataError(f"{option}: {entry.path} is empty: it has no samples")
    try:
        kind = _recognise(row)
    except DataError as error:
        raise DataError(f"{option}.type: auto: {entry.path}: {error}") from error
    logger.info("%s: read as type %s, by its columns %s", entry.path, kind, ", ".join(row))
    return kind


def _first_row(entry: DatasetEntry, source: RowSource, selected: Sequence[str] | None) -> Row | None:
    """The first row or, if bad rows are skipped, the first readable one. Otherwise, a bad row raises its DataError."""
    for chunk in source.chunks(selected):
        for row in chunk.read():
            if not isinstance(row, DataError):
                return {name: value for name, value in row.items() if name not in entry.ignore_columns}
            if entry.skip_bad_rows is None:
                raise row
    return None


def _has_split_messages(row: Row, column_names: Mapping[str, str]) -> bool:
    return all(holds_messages(row.get(column_names.get(name, name))) for name in SPLIT_COLUMNS)


def _recognise(row: Row) -> FormatName:
    names = set(row)
    if "input_ids" in names:
        return "tokenized"
    if {"chosen", "rejected"} <= names:
        return "preference"
    if names & set(MESSAGE_COLUMNS) or _has_split_messages(row, {}):
        return "chat"
    if any({parts[0], answer} <= names for parts, answer in COLUMN_SETS):
        return "prompt_completion"
    if "text" in names:
        return "text"
    raise DataError(
        f"the columns {', '.join(sorted(names)) or '(none)'} are not known: want input_ids, messages or conversations, "
        "chosen and rejected, prompt and completion, instruction and output, question and answer, or text. Set the "
        "entry's type, and set column_names to its columns"
    )


def _check_options(entry: DatasetEntry, kind: FormatName, option: str) -> None:
    # The completion of a conversation in two columns consists of the assistant's messages in it.
    is_split = entry.type == "prompt_completion" and kind == "chat" and entry.train_on == "completion"
    if entry.train_on is not None and entry.train_on not in TARGETS[kind] and not is_split:
        wanted = ", ".join(TARGETS[kind]) or "none, because the labels select the trained tokens"
        raise DataError(f"{option}.train_on: {entry.train_on} is not valid for type {kind}; valid values: {wanted}")
    for name in ("chat_template", "chat_template_kwargs"):
        if getattr(entry, name) and kind not in ("chat", "preference"):
            raise DataError(f"{option}.{name}: type {kind} has no template; remove it")
    if kind == "preference" and entry.overflow in ("truncate", "split"):
        raise DataError(
            f"{option}.overflow: {entry.overflow} would separate the answers of a pair; set it to drop or error"
        )
    unknown = [name for name in entry.column_names if name not in COLUMN_KEYS[kind]]
    if unknown:
        wanted = ", ".join(COLUMN_KEYS[kind]) or "none; columns=[...] selects token columns"
        raise DataError(f"{option}.column_names: {unknown[0]!r} is not valid for type {kind}; valid names: {wanted}")
    if kind == "prompt_completion" and entry.column_names:
        column_sets = [{*parts, answer} for parts, answer in COLUMN_SETS]
        if not any(set(entry.column_names) <= {*names, *CONTEXT_COLUMNS} for names in column_sets):
            raise DataError(
                f"{option}.column_names: {', '.join(entry.column_names)} do not belong together; name prompt and "
                "completion, or instruction, input and output, or question and answer (and system and history)"
            )
