"""The base of the formats that render rows to text, and the simplest of them: plain documents for pretraining."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from xorl.data.arguments import check_fields
from xorl.data.errors import DataError
from xorl.data.formats.encoded import EncodedDocuments, Overflow, apply_overflow
from xorl.data.formats.spans import Rendered, tokenize
from xorl.data.formats.tokenizer import TextTokenizer
from xorl.data.hashing import JSON
from xorl.data.readers import Chunk, Row


@dataclass(frozen=True)
class RenderedFormat(ABC):
    """A format that renders each row to a text and tokenizes it. `columns` maps its column names to other ones."""

    limit: int
    overflow: Overflow
    limit_option: str
    tokenizer: TextTokenizer
    columns: Mapping[str, str] = field(default_factory=dict)
    vocab_size: int | None = None

    type_name: ClassVar[str]

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def extras(self) -> tuple[str, ...]:
        return ()

    @property
    @abstractmethod
    def selected(self) -> tuple[str, ...]: ...

    @property
    def masks_prompts(self) -> bool:
        return False

    @property
    def uses_current_date(self) -> bool:
        return False

    def fingerprint(self) -> dict[str, JSON]:
        return {
            "type": self.type_name,
            "limit": self.limit,
            "overflow": self.overflow,
            "tokenizer": self.tokenizer.content,
            "columns": dict(self.columns),
        }

    @abstractmethod
    def render(self, row: Row) -> Rendered:
        """The text of a row with its trained characters. Raises DataError, without location, for an unusable row."""

    def encode(self, chunk: Chunk) -> EncodedDocuments:
        rendered: list[Rendered] = []
        for index, row in enumerate(chunk.rows()):
            try:
                rendered.append(self.render(row))
            except DataError as error:
                raise DataError(f"{chunk.location(index)}: {error}") from error
        return apply_overflow(tokenize(rendered, self.tokenizer, chunk), chunk, self)


@dataclass(frozen=True)
class TextFormat(RenderedFormat):
    """One document per row, from the column text; every token is trained.

    A document ends with one EOS, and begins with BOS if the tokenizer itself would add one.
    """

    type_name: ClassVar[str] = "text"

    @property
    def selected(self) -> tuple[str, ...]:
        return (self.columns.get("text", "text"),)

    def render(self, row: Row) -> Rendered:
        (column,) = self.selected
        value = row.get(column)
        if not isinstance(value, str):
            state = "does not exist" if column not in row else f"is {'null' if value is None else type(value).__name__}"
            raise DataError(
                f"column {column!r} {state}, want a string; the columns are: {', '.join(row) or 'none'} (set "
                "column_names to use another one)"
            )
        # An empty document gets no EOS, so that it is counted as empty.
        return Rendered(f"{self.tokenizer.begin_of(value)}{value}{self.tokenizer.end_of(value)}" if value else "", None)
