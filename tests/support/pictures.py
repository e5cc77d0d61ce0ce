"""Image files for tests of data, and settings of a small image processor, which need no Pillow."""

import io
from dataclasses import replace

import numpy as np
import pytest

from xorl.data.images import ImageSettings

PLACEHOLDER = 262  # <|pad|> of the tests' tokenizer
SETTINGS = ImageSettings(
    placeholder=PLACEHOLDER,
    patch_size=4,
    merge_size=2,
    min_pixels=128,
    max_pixels=1024,
    fixed_size=None,
    crops=False,
    resample="bicubic",
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    has_axes=True,
)
FIXED = replace(SETTINGS, merge_size=1, min_pixels=None, max_pixels=None, fixed_size=(12, 12), has_axes=False)


def picture(width=24, height=16, seed=0, mode="RGB", kind="PNG", **options) -> bytes:
    """A file of random pixels."""
    Image = pytest.importorskip("PIL.Image")  # an extra
    channels = len(Image.new(mode, (1, 1)).getbands())
    shape = (height, width) if channels == 1 else (height, width, channels)
    values = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return picture_of(Image.fromarray(values, mode), kind, **options)


def picture_of(image, kind="PNG", **options) -> bytes:
    """The file of an image."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
