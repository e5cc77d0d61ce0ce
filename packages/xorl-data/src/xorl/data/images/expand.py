"""Replaces the placeholder of each image in tokenized rows with as many as the image has tokens; none is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from xorl.data.batch import IGNORE
from xorl.data.chunks import Chunk
from xorl.data.errors import DataError
from xorl.data.formats.encoded import EncodedRows
from xorl.data.images.pixels import read_header
from xorl.data.images.settings import ImageSettings
from xorl.data.images.size import grid_of, num_tokens
from xorl.data.images.source import ImageSource
from xorl.data.images.table import StoredImage, TableWriter, content_digest
from xorl.data.receipt import Counts


def expand_images(
    rows: EncodedRows, sources: Sequence[Sequence[ImageSource]], settings: ImageSettings, chunk: Chunk
) -> EncodedRows:
    """`rows` with the tokens of their images; `sources` are those of each row, in the order of their placeholders.

    Raises DataError, with file and row, if a row has another number of placeholders than of images, or an image that
    cannot be used.
    """
    places = np.flatnonzero(rows.input_ids == settings.placeholder)
    ends = np.cumsum(rows.lengths)
    row_of_place = np.searchsorted(ends, places, side="right")
    found = np.bincount(row_of_place, minlength=len(rows.lengths))
    for index, given in enumerate(sources):
        if found[index] != len(given):
            raise DataError(
                f"{chunk.location(index)}: the text has {found[index]} placeholders of images, and the row "
                f"{len(given)} images; a message must not contain the placeholder itself, and the template must write "
                "one for each image"
            )
    if not len(places):
        return rows
    writer, counts = TableWriter(), Counts()
    images = [(index, source) for index, given in enumerate(sources) for source in given]
    sizes = np.ones(len(rows.input_ids), np.int64)
    first_of_row = ends - rows.lengths
    last_row, shift = -1, 0  # how many tokens earlier images of the row have added
    for place, (index, source) in zip(places.tolist(), images, strict=True):
        shift = shift if index == last_row else 0
        last_row = index
        try:
            image, count = _image(source, place - int(first_of_row[index]) + shift, settings)
        except DataError as error:
            raise DataError(f"{chunk.location(index)}: {source.name}: {error}") from error
        writer.add(index, image)
        counts += count
        sizes[place] = image.num_tokens
        shift += image.num_tokens - 1
    input_ids = np.repeat(rows.input_ids, sizes)
    labels = np.repeat(rows.input_ids if rows.labels is None else rows.labels, sizes)
    labels[input_ids == settings.placeholder] = IGNORE
    added = np.bincount(row_of_place, weights=sizes[places] - 1, minlength=len(rows.lengths)).astype(np.int64)
    return replace(
        rows,
        input_ids=input_ids,
        labels=labels,
        lengths=rows.lengths + added,
        counts=rows.counts + counts,
        images=writer.table(),
    )


def _image(source: ImageSource, start: int, settings: ImageSettings) -> tuple[StoredImage, Counts]:
    content = source.read()
    header = read_header(content, settings)
    grid = grid_of(header.size, settings)
    image = StoredImage(source, content_digest(content), start, num_tokens(grid, settings), header.size, grid)
    before, after = header.size.area, grid.area * settings.patch_size**2
    return image, Counts(
        images=1,
        image_tokens=image.num_tokens,
        image_patches=grid.area,
        image_bytes=len(content),
        enlarged_images=int(after > before),
        reduced_images=int(after < before),
        rotated_images=int(header.is_rotated),
        transparent_images=int(header.is_transparent),
    )
