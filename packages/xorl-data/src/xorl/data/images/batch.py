"""Images: the patches of a micro-batch's images, and where their tokens are in its row.

Shapes: T tokens of the row, P patches, C values of a patch, I images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from xorl.data.errors import DataError
from xorl.data.images.coordinates import document_coordinates
from xorl.data.images.pixels import read_patches
from xorl.data.images.settings import ImageSettings
from xorl.data.images.size import Size
from xorl.data.images.table import StoredImage

# The pixel value of the image that fills in for a batch without images. Mid-grey keeps activations finite.
_GREY = 128


@dataclass(frozen=True)
class Images:
    """The images of a micro-batch, in the order of their tokens.

    Every batch of a run with images has at least one, so that all ranks encode: a batch without an image has a grey one
    that no token stands for.

    Attributes:
        patches: [P, C] uint8, of all images.
        grids: the (height, width) of each image in patches.
        features: [T] int64, on the CPU: which feature of the images a token stands for, by number; -1 for none.
        mean, std: by color; see `ImageSettings`.
    """

    patches: Tensor
    grids: tuple[tuple[int, int], ...]
    features: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def num_images(self) -> int:
        """How many images the tokens stand for."""
        return len(self.grids) if bool((self.features >= 0).any()) else 0

    def with_tensors(self, move: Callable[[Tensor], Tensor]) -> Images:
        """Returns a copy with its patches moved by `move`. Grids and features stay on the host."""
        return replace(self, patches=move(self.patches))


@dataclass(frozen=True)
class DocumentImages:
    """The images of a document: their patches, and where their tokens are."""

    patches: Sequence[Tensor]
    stored: Sequence[StoredImage]


NO_IMAGES = DocumentImages((), ())


def load_images(stored: Sequence[StoredImage], settings: ImageSettings) -> DocumentImages:
    """Reads and decodes the images of a document. Raises DataError, with the file, for one that cannot be used."""
    patches = []
    for image in stored:
        try:
            found = read_patches(image.read(), settings)
        except DataError as error:
            raise DataError(f"{image.source.name}: {error}") from error
        if len(found) != image.grid.area:
            raise DataError(
                f"{image.source.name} has {len(found)} patches, but the prepared data has {image.grid.area}; remove "
                "the prepared data and prepare it again"
            )
        patches.append(found)
    return DocumentImages(patches, stored)


def coordinates_of(num_tokens: int, images: Sequence[StoredImage], settings: ImageSettings) -> np.ndarray:
    """The coordinates [num_tokens, 3] of a document's tokens; see `document_coordinates`."""
    grids = [(image.start, image.grid.divided(settings.merge_size)) for image in images]
    return document_coordinates(num_tokens, grids)


def collate_images(
    documents: Sequence[DocumentImages], lengths: Sequence[int], num_tokens: int, settings: ImageSettings
) -> Images:
    """The images of documents of these lengths in a row of `num_tokens`."""
    features = np.full(num_tokens, -1, np.int64)
    patches: list[Tensor] = []
    grids: list[tuple[int, int]] = []
    first = num_features = 0
    for document, length in zip(documents, lengths, strict=True):
        for image, pixels in zip(document.stored, document.patches, strict=True):
            span = slice(first + image.start, first + image.stop)
            features[span] = np.arange(num_features, num_features + image.num_tokens)
            patches.append(pixels)
            grids.append((image.grid.height, image.grid.width))
            num_features += image.num_tokens
        first += length
    if not grids:
        grid = _smallest_grid(settings)
        patches = [torch.full((grid.area, 3 * settings.patch_size**2), _GREY, dtype=torch.uint8)]
        grids = [(grid.height, grid.width)]
    return Images(torch.cat(patches), tuple(grids), torch.from_numpy(features), settings.mean, settings.std)


def _smallest_grid(settings: ImageSettings) -> Size:
    if settings.fixed_size is not None:
        return Size(*settings.fixed_size).divided(settings.patch_size)
    return Size(settings.merge_size, settings.merge_size)
