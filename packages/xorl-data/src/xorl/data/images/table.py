"""ImageTable: the images of documents, as a chunk's encoding returns them and as stores keep them.

A record names a file or the place of its bytes in `sources`, and its digest: a file that has changed is never used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from xorl.data.errors import DataError
from xorl.data.images.size import Size
from xorl.data.images.source import ImageSource

# document: its number; start: of the first of `tokens` tokens in it; height, width: in pixels of the file, upright;
# grid_height, grid_width: in patches; offset, length: of the path, or of the content, in `sources`.
RECORD = np.dtype(
    [
        ("document", np.int64),
        ("start", np.int32),
        ("tokens", np.int32),
        ("height", np.int32),
        ("width", np.int32),
        ("grid_height", np.int32),
        ("grid_width", np.int32),
        ("offset", np.int64),
        ("length", np.int64),
        ("has_content", np.uint8),
        ("digest", np.uint8, 16),
    ]
)


@dataclass(frozen=True, eq=False)
class ImageTable:
    """Images in the order of documents, and within a document of their tokens.

    Attributes:
        records: [I] of RECORD.
        sources: [B] uint8: paths and contents, one after the other.
    """

    records: np.ndarray
    sources: np.ndarray

    @classmethod
    def empty(cls) -> ImageTable:
        return cls(np.empty(0, RECORD), np.empty(0, np.uint8))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ImageTable) and all(
            np.array_equal(own, its) for own, its in ((self.records, other.records), (self.sources, other.sources))
        )

    def patches(self, num_documents: int) -> np.ndarray:
        """[num_documents, 2] float64: the patches of all images of each document, and the sum of their squares."""
        areas = self.records["grid_height"].astype(np.float64) * self.records["grid_width"]
        counts = [np.bincount(self.records["document"], each, num_documents) for each in (areas, areas**2)]
        return np.stack(counts, -1)

    def of_document(self, number: int) -> list[StoredImage]:
        """The images of a document."""
        first, last = np.searchsorted(self.records["document"], [number, number + 1])
        return [self._image(record) for record in self.records[first:last]]

    def keep(self, kept: np.ndarray, documents: np.ndarray) -> ImageTable:
        """The images where `kept` [I] is true; `documents` [I] are the new numbers of their documents."""
        records = self.records[kept].copy()
        records["document"] = documents[kept]
        return ImageTable(records, self.sources)

    def _image(self, record: np.void) -> StoredImage:
        offset = int(record["offset"])
        text = self.sources[offset : offset + int(record["length"])].tobytes()
        source = ImageSource(None, text) if record["has_content"] else ImageSource(Path(text.decode()), None)
        return StoredImage(
            source=source,
            digest=record["digest"].tobytes(),
            start=int(record["start"]),
            num_tokens=int(record["tokens"]),
            size=Size(int(record["height"]), int(record["width"])),
            grid=Size(int(record["grid_height"]), int(record["grid_width"])),
        )


@dataclass(frozen=True)
class StoredImage:
    """An image of a document: its tokens begin with token `start` of the document."""

    source: ImageSource
    digest: bytes
    start: int
    num_tokens: int
    size: Size
    grid: Size

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    def read(self) -> bytes:
        """The content of the file. Raises DataError, without its name, if it is not that of the prepared data."""
        content = self.source.read()
        if content_digest(content) != self.digest:
            raise DataError(
                "the image has changed since the data was prepared; restore it, or remove the prepared data and "
                "prepare it again"
            )
        return content


class TableWriter:
    """Collects the images of rows."""

    def __init__(self) -> None:
        self._records: list[tuple[object, ...]] = []
        self._sources: list[bytes] = []
        self._num_bytes = 0

    def add(self, row: int, image: StoredImage) -> None:
        has_content = image.source.content is not None
        text = image.source.content if image.source.content is not None else str(image.source.path).encode()
        self._records.append(
            (
                row,
                image.start,
                image.num_tokens,
                *image.size,
                *image.grid,
                self._num_bytes,
                len(text),
                has_content,
                tuple(image.digest),
            )
        )
        self._sources.append(text)
        self._num_bytes += len(text)

    def table(self) -> ImageTable:
        return ImageTable(np.array(self._records, RECORD), np.frombuffer(b"".join(self._sources), np.uint8))


def content_digest(content: bytes) -> bytes:
    """16 bytes that identify the content of a file."""
    return xxhash.xxh3_128_digest(content)
