"""Opens image files with Pillow and cuts them into patches of 8-bit values; models normalise the values themselves.

Images are upright (their orientation is applied), and transparent ones stand on white.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor

from xorl.data.errors import DataError, DataFailure
from xorl.data.images.settings import ImageSettings
from xorl.data.images.size import Size, resized

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
# What Pillow calls photos of many phones: a JPEG that is followed by others, which are not used.
_STILL = "MPO"
_ORIENTATION = 0x0112
# The orientations that exchange height and width.
_TURNED = (5, 6, 7, 8)
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
# The side, in pixels, of the image that `decoder_digest` encodes and decodes.
_TEST_SIDE = 48


@dataclass(frozen=True)
class ImageHeader:
    """The header of an image file. size: in pixels, upright."""

    size: Size
    is_rotated: bool
    is_transparent: bool


def read_header(content: bytes, settings: ImageSettings) -> ImageHeader:
    """The header of an image file. Raises DataError if it is not an image, or if it is too large or not supported."""
    with _opened(content, settings) as image, _decoding():
        return _header_of(image)


def read_patches(content: bytes, settings: ImageSettings) -> Tensor:
    """[P, 3 * patch_size^2] uint8: the patches of an image, in the order of tokens, and within a token by rows.

    The values of a patch are by color, then row, then column. Raises DataError if the file cannot be decoded.
    """
    with _opened(content, settings) as image:
        with _decoding():
            size, pixels = _header_of(image).size, np.array(_upright_rgb(image))  # [H, W, 3]
        target = resized(size, settings)
    values = torch.from_numpy(pixels).permute(2, 0, 1)  # [3, H, W]
    if values.shape[1:] != target:
        values = F.interpolate(values[None], target, mode=settings.resample, align_corners=False, antialias=True)[0]
    if settings.fixed_size is not None:
        values = _middle(values, Size(*settings.fixed_size))
    patch, merge = settings.patch_size, settings.merge_size
    height, width = (side // settings.factor for side in values.shape[1:])
    values = values[:, : height * settings.factor, : width * settings.factor]
    cut = values.reshape(3, height, merge, patch, width, merge, patch).permute(1, 4, 2, 5, 0, 3, 6)
    return cut.reshape(height * width * merge**2, 3 * patch**2).contiguous()


@cache
def decoder_digest() -> str:
    """Identifies what this installation makes of image files: builds of decoders may differ in single values."""
    Image, _ = _pillow()
    ramp = np.arange(_TEST_SIDE * _TEST_SIDE * 3, dtype=np.uint32).reshape(_TEST_SIDE, _TEST_SIDE, 3)
    pixels = ((ramp * 2654435761) >> 24).astype(np.uint8)
    settings = ImageSettings(
        0, 8, 2, 1024, 4096, None, crops=False, resample="bicubic", mean=(0.0,) * 3, std=(1.0,) * 3, has_axes=False
    )
    hasher = xxhash.xxh3_64()
    # One lossy and one lossless format.
    for name in ("JPEG", "PNG"):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, name)
        hasher.update(read_patches(file.getvalue(), settings).numpy().tobytes())
    return hasher.hexdigest()


@contextmanager
def _opened(content: bytes, settings: ImageSettings) -> Iterator[Image]:
    """The image of a file, not decoded yet."""
    module, _ = _pillow()
    try:
        with warnings.catch_warnings():
            # Pillow warns of large images; the limit here is checked below.
            warnings.simplefilter("ignore", module.DecompressionBombWarning)
            image = module.open(io.BytesIO(content), formats=_FORMATS)
    except module.DecompressionBombError as error:
        raise DataError(f"the image is too large to decode: {error}") from error
    except (OSError, SyntaxError, ValueError) as error:
        known = ", ".join(_FORMATS)
        raise DataError(f"the image is not a file that can be read, of {len(content)} bytes; known: {known}") from error
    with image:
        size = Size(image.height, image.width)
        if size.area > settings.max_decoded_pixels:
            raise DataError(f"the image has {size} pixels, more than the limit of {settings.max_decoded_pixels}")
        if image.format != _STILL and getattr(image, "n_frames", 1) > 1:
            raise DataError("the image is animated, which is not supported; store one of its frames")
        if image.mode not in _MODES:
            raise DataError(f"the image has values of the kind {image.mode!r}; convert it to 8 bits a color")
        yield image


@contextmanager
def _decoding() -> Iterator[None]:
    """Raises DataError for what Pillow raises. It decodes some formats for their orientation, which may stand last."""
    try:
        yield
    except DataError:
        raise
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"the image cannot be decoded: {error}") from error


def _header_of(image: Image) -> ImageHeader:
    orientation = image.getexif().get(_ORIENTATION, 1)
    height, width = image.height, image.width
    size = Size(width, height) if orientation in _TURNED else Size(height, width)
    return ImageHeader(size, orientation in range(2, 9), _is_transparent(image))


def _is_transparent(image: Image) -> bool:
    return "A" in image.getbands() or image.info.get("transparency") is not None


def _upright_rgb(image: Image) -> Image:
    module, operations = _pillow()
    is_transparent = _is_transparent(image)
    image = operations.exif_transpose(image)
    if not is_transparent:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = module.new("RGBA", image.size, (255, 255, 255, 255))
    return module.alpha_composite(white, image).convert("RGB")


def _middle(values: Tensor, size: Size) -> Tensor:
    """The middle of an image [3, H, W]."""
    top, left = (values.shape[1] - size.height) // 2, (values.shape[2] - size.width) // 2
    return values[:, top : top + size.height, left : left + size.width]


@cache
def _pillow():  # noqa: ANN202  (the types are those of modules that may be missing)
    try:
        from PIL import Image, ImageOps  # noqa: PLC0415  (an extra, which only images need)
    except ImportError as error:
        raise DataFailure("images need Pillow, which is not installed: install xorl-data[images]") from error
    return Image, ImageOps
