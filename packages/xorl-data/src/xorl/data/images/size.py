"""The sizes of images: from the pixels of a file to those of the resized image, patches and tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

from xorl.data.errors import DataError
from xorl.data.images.settings import ImageSettings

_MAX_RATIO = 200


class Size(NamedTuple):
    """A height and a width: in pixels, in patches or in tokens."""

    height: int
    width: int

    @property
    def area(self) -> int:
        return self.height * self.width

    def __str__(self) -> str:
        return f"{self.width} x {self.height}"

    def divided(self, number: int) -> Size:
        return Size(self.height // number, self.width // number)


def resized(size: Size, settings: ImageSettings) -> Size:
    """The size to resize an image to, before a crop. Raises DataError for an image that is too long and thin."""
    if settings.fixed_size is not None:
        fixed = Size(*settings.fixed_size)
        if not settings.crops:
            return fixed
        short = min(fixed)
        long = int(short * max(size) / min(size))
        return Size(short, long) if size.height <= size.width else Size(long, short)
    assert settings.min_pixels is not None, "checked with the settings"
    assert settings.max_pixels is not None, "checked with the settings"
    if max(size) > _MAX_RATIO * min(size):
        raise DataError(f"the image has {size} pixels, and one side may be at most {_MAX_RATIO} times the other")
    factor = settings.factor
    # Python rounds halves to even, as the processors of these models do.
    nearest = Size(*(round(side / factor) * factor for side in size))
    if nearest.area > settings.max_pixels:
        shrink = math.sqrt(size.area / settings.max_pixels)
        return Size(*(max(factor, math.floor(side / shrink / factor) * factor) for side in size))
    if nearest.area < settings.min_pixels:
        grow = math.sqrt(settings.min_pixels / size.area)
        return Size(*(math.ceil(side * grow / factor) * factor for side in size))
    return nearest


def grid_of(size: Size, settings: ImageSettings) -> Size:
    """The patches of an image of `size` pixels."""
    final = resized(size, settings) if settings.fixed_size is None else Size(*settings.fixed_size)
    return final.divided(settings.patch_size)


def num_tokens(grid: Size, settings: ImageSettings) -> int:
    """The tokens that stand for an image of `grid` patches."""
    return grid.area // settings.merge_size**2
