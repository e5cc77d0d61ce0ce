"""Sources of images: what a row says, as a file below a known folder or as the bytes of one."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from xorl.data.chunks import excerpt
from xorl.data.errors import DataError

# The keys of a content part that may hold an image, in the order in which they are looked at.
SOURCE_KEYS = ("bytes", "path", "image", "image_url", "url", "base64")
_DATA_URI = re.compile(r"data:(?P<type>[\w.+/-]*)(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE)


@dataclass(frozen=True)
class ImageSource:
    """An image file: its path, or its bytes if they are in the row."""

    path: Path | None
    content: bytes | None

    @property
    def name(self) -> str:
        """The name for messages."""
        return "bytes in the row" if self.path is None else str(self.path)

    def read(self) -> bytes:
        """The bytes of the file. Raises DataError, without its name, if it cannot be read."""
        if self.content is not None:
            return self.content
        assert self.path is not None, "one of both is given"
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise DataError(f"the image cannot be read: {error.strerror}") from error


def image_source(value: object, root: Path | None) -> ImageSource:
    """The source that a row gives: a path, bytes, a data URI, or an object with one of SOURCE_KEYS.

    Paths are relative to `root`, and must not lead out of it; None: there is no such folder. Raises DataError, without
    the location of the row, for anything else.
    """
    if isinstance(value, (bytes, bytearray)):
        return ImageSource(None, bytes(value))
    if isinstance(value, Mapping):
        given = next((value[key] for key in SOURCE_KEYS if value.get(key) is not None), None)
        if given is None:
            raise DataError(f"an image is an object without {', '.join(SOURCE_KEYS[:-1])} or {SOURCE_KEYS[-1]}")
        if value.get("base64") is given and isinstance(given, str):
            return ImageSource(None, _decoded(given))
        return image_source(given, root)
    if not isinstance(value, str):
        raise DataError(f"an image is {type(value).__name__}, want a path, bytes or a data URI")
    if value.startswith("data:"):
        found = _DATA_URI.match(value)
        if found is None:
            raise DataError(f"the image {excerpt(value)} is not a data URI in base64: data:image/png;base64,...")
        return ImageSource(None, _decoded(value[found.end() :]))
    if re.match(r"[a-z][a-z0-9+.-]*://", value, re.IGNORECASE):
        if not value.lower().startswith("file://"):
            raise DataError(f"the image {excerpt(value)} is not downloaded; store the file, and name its path")
        value = value[len("file://") :]
    if root is None:
        raise DataError(
            f"the image {excerpt(value)} is a path, but the dataset is in no local folder that it could be relative "
            "to; set images.root, or store the bytes in the rows"
        )
    folder = root.resolve()
    path = (folder / value).resolve()
    if not path.is_relative_to(folder):
        raise DataError(f"the image {excerpt(value)} is outside of {folder}; move it there, or set images.root")
    return ImageSource(path, None)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"the image {excerpt(text)} is not valid base64: {error}") from error
