"""The text format: plain documents, every token trained, for pretraining."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xorl.data.errors import DataError
from xorl.data.formats.encoded import EncodedDocuments, Overflow, fit
from xorl.data.formats.spans import Text, tokenize
from xorl.data.formats.tokenizer import TextTokenizer
from xorl.data.readers import Piece, Row
from xorl.data.receipt import Counts
from xorl.data.shuffle import JSON


@dataclass(frozen=True)
class TextFormat:
    """One document per row, in the column text or the one that `columns` maps it to.

    A document ends with one EOS and begins with BOS if the tokenizer itself would add it.
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
    def writes_the_day(self) -> bool:
        return False

    def fingerprint(self) -> dict[str, JSON]:
        return {
            "type": "text",
            "limit": self.limit,
            "overflow": self.overflow,
            "tokenizer": self.tokenizer.content,
            "columns": dict(self.columns),
        }

    def encode(self, piece: Piece) -> EncodedDocuments:
        texts = [self._text(row, index, piece) for index, row in enumerate(piece.rows())]
        return fit(tokenize(texts, self.tokenizer, piece, Counts()), piece, self)

    def _text(self, row: Row, index: int, piece: Piece) -> Text:
        value = row.get(self._column)
        if not isinstance(value, str):
            absent = self._column not in row
            state = "does not exist" if absent else f"holds {'null' if value is None else type(value).__name__}"
            raise DataError(
                f"{piece.place(index)}: column {self._column!r} {state}, want a string; the columns are: "
                f"{', '.join(row) or 'none'} (columns: names another)"
            )
        # An empty document stays empty and is counted as empty.
        return Text(f"{self.tokenizer.begin_of(value)}{value}{self.tokenizer.end_of(value)}" if value else "", None)
