"""The text format: plain documents for pretraining, in which every token is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xorl.data.errors import DataError
from xorl.data.formats.encoded import EncodedDocuments, Overflow, apply_overflow
from xorl.data.formats.spans import Text, tokenize
from xorl.data.formats.tokenizer import TextTokenizer
from xorl.data.hashing import JSON
from xorl.data.readers import Chunk, Row
from xorl.data.receipt import Counts


@dataclass(frozen=True)
class TextFormat:
    """One document per row, from the column text or the one that `columns` maps it to.

    A document ends with one EOS, and begins with BOS if the tokenizer itself would add one.
    """

    limit: int
    overflow: Overflow
    limit_option: str
    tokenizer: TextTokenizer
    columns: Mapping[str, str] = field(default_factory=dict)
    vocab_size: int | None = None

    @property
    def extras(self) -> tuple[str, ...]:
        return ()

    @property
    def selected(self) -> tuple[str, ...]:
        return (self._column,)

    @property
    def _column(self) -> str:
        return self.columns.get("text", "text")

    @property
    def masks_prompts(self) -> bool:
        return False

    @property
    def uses_current_date(self) -> bool:
        return False

    def fingerprint(self) -> dict[str, JSON]:
        return {
            "type": "text",
            "limit": self.limit,
            "overflow": self.overflow,
            "tokenizer": self.tokenizer.content,
            "columns": dict(self.columns),
        }

    def encode(self, chunk: Chunk) -> EncodedDocuments:
        texts = [self._text(row, index, chunk) for index, row in enumerate(chunk.rows())]
        return apply_overflow(tokenize(texts, self.tokenizer, chunk, Counts()), chunk, self)

    def _text(self, row: Row, index: int, chunk: Chunk) -> Text:
        value = row.get(self._column)
        if not isinstance(value, str):
            is_missing = self._column not in row
            state = "does not exist" if is_missing else f"is {'null' if value is None else type(value).__name__}"
            raise DataError(
                f"{chunk.location(index)}: column {self._column!r} {state}, want a string; the columns are: "
                f"{', '.join(row) or 'none'} (set columns to use another one)"
            )
        # An empty document gets no EOS, so that it is counted as empty.
        return Text(f"{self.tokenizer.begin_of(value)}{value}{self.tokenizer.end_of(value)}" if value else "", None)
