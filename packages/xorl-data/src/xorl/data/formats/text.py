"""The base of the formats that render rows to text, and the simplest of them: plain documents for pretraining."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from xorl.data.arguments import check_fields
from xorl.data.chunks import Chunk, Row, WithoutColumns
from xorl.data.errors import DataError
from xorl.data.formats.encoded import EncodedDocuments, EncodedRows, Overflow, apply_overflow, encode_usable
from xorl.data.formats.masks import check_row_masks
from xorl.data.formats.spans import Rendered, tokenize
from xorl.data.formats.tokenizer import TextTokenizer
from xorl.data.hashing import JSON
from xorl.data.receipt import Findings


@dataclass(frozen=True)
class RenderedFormat(ABC):
    """A format that renders each row to a text and tokenizes it. `columns` maps its column names to other ones."""

    limit: int
    overflow: Overflow
    limit_option: str
    tokenizer: TextTokenizer
    columns: Mapping[str, str] = field(default_factory=dict)
    vocab_size: int | None = None
    skip_bad_rows: bool = False
    ignored: tuple[str, ...] = ()

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
            # Part of the key only if it is on, although the documents are the same if no row is skipped.
            **({"skip_bad_rows": True} if self.skip_bad_rows else {}),
            **({"ignored": [*self.ignored]} if self.ignored else {}),
        }

    @abstractmethod
    def render(self, row: Row) -> Rendered:
        """The text of a row with its trained characters. Raises DataError, without location, for an unusable row."""

    @abstractmethod
    def used_columns(self, row: Row) -> frozenset[str]:
        """The columns of a row that `render` reads."""

    def unused_keys(self) -> tuple[str, ...]:
        """The keys within columns, such as message keys, that were found so far and are not used."""
        return ()

    def tokenize(self, rendered: Sequence[Rendered], chunk: Chunk) -> EncodedRows:
        """The tokens of rendered texts, the rows of the chunk."""
        return tokenize(rendered, self.tokenizer, chunk)

    def encode(self, chunk: Chunk) -> EncodedDocuments:
        chunk = WithoutColumns(chunk, self.ignored) if self.ignored else chunk
        rows, usable = encode_usable(chunk, self._encode_rows, skip_bad_rows=self.skip_bad_rows)
        return apply_overflow(rows, usable, self)

    def _encode_rows(self, chunk: Chunk) -> EncodedRows:
        rendered: list[Rendered] = []
        unused: dict[str, None] = {}
        seen = set[str]()
        for index, row in enumerate(chunk.rows()):
            try:
                used = self.used_columns(row)
                check_row_masks(row, used)
                rendered.append(self.render(row))
            except DataError as error:
                raise DataError(f"{chunk.location(index)}: {error}") from error
            seen.update(row)
            unused |= {name: None for name in row if name not in used and row[name] is not None}
        # Readers leave unselected columns of Parquet files out of the rows.
        unused |= {name: None for name in chunk.names() if name not in seen}
        rows = self.tokenize(rendered, chunk)
        return replace(rows, findings=Findings((*unused, *self.unused_keys())))


@dataclass(frozen=True)
class TextFormat(RenderedFormat):
    """One document per row, from the column text; every token is trained.

    A document ends with one EOS, and begins with BOS if the tokenizer itself would add one.
    """

    type_name: ClassVar[str] = "text"

    @property
    def selected(self) -> tuple[str, ...]:
        return (self.columns.get("text", "text"),)

    def used_columns(self, row: Row) -> frozenset[str]:
        return frozenset(self.selected)

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
