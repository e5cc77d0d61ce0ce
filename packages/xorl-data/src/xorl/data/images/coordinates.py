"""The coordinates of a document's tokens on the axes of time, height and width, for models that rotate by three axes.

A token of text has three equal coordinates. Those of an image begin where the text before it ends, and text continues
above the longest side of the image (arXiv:2409.12191, section 2.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xorl.data.images.size import Size


def document_coordinates(num_tokens: int, images: Sequence[tuple[int, Size]]) -> np.ndarray:
    """[num_tokens, 3] int64. images: for each, its first token in the document and its grid of tokens, in order."""
    coordinates = np.empty((num_tokens, 3), np.int64)
    token = place = 0
    for start, grid in images:
        num_text = start - token
        assert num_text >= 0, f"an image begins at token {start}, within the one before it"
        coordinates[token:start] = np.arange(place, place + num_text)[:, None]
        place += num_text
        stop = start + grid.area
        rows, columns = np.divmod(np.arange(grid.area), grid.width)
        coordinates[start:stop, 0] = place
        coordinates[start:stop, 1] = place + rows
        coordinates[start:stop, 2] = place + columns
        place += max(grid)
        token = stop
    coordinates[token:] = np.arange(place, place + num_tokens - token)[:, None]
    return coordinates
