"""ImageSettings: how a model's images are resized, cut into patches and counted in tokens.

They follow the image processor of the model's folder (preprocessor_config.json or processor_config.json).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from xorl.data.arguments import check_at_least, check_fields, checked
from xorl.data.errors import DataError
from xorl.data.hashing import JSON

Resample = Literal["bilinear", "bicubic"]

# The numbers of Pillow's filters, which files use.
_RESAMPLES: Mapping[object, Resample] = {2: "bilinear", 3: "bicubic", "bilinear": "bilinear", "bicubic": "bicubic"}
_FILES = ("preprocessor_config.json", "processor_config.json")
# Decoding an image of this size takes half a gigabyte. Larger ones are refused before they are decoded.
_MAX_DECODED_PIXELS = 100_000_000


@dataclass(frozen=True)
class ImageSettings:
    """How images become patches, and patches tokens. A patch is a square of pixels; a token stands for several.

    Attributes:
        placeholder: the id of the token that stands for a part of an image; templates write it once for each image.
        patch_size: the pixels on a side of a patch.
        merge_size: the patches on a side of the square that a token stands for.
        min_pixels, max_pixels: limits on the area of the resized image, whose proportions are roughly kept. None with
            `fixed_size`.
        fixed_size: (height, width) of all resized images; None: each image has its own size. Pixels at the bottom and
            on the right that do not fill a patch are not read.
        crops: with `fixed_size`, keep the proportions and crop to the center; otherwise, stretch.
        resample: how pixels are interpolated.
        mean, std: by color, what the model subtracts from values between 0 and 1, and then divides them by.
        has_axes: whether tokens of an image have coordinates of their own on three axes: time, height and width.
        root: the folder that files of images must be in; None: that of their dataset.
        max_decoded_pixels: images with more pixels before they are resized are refused.
    """

    placeholder: int
    patch_size: int
    merge_size: int
    min_pixels: int | None
    max_pixels: int | None
    fixed_size: tuple[int, int] | None
    crops: bool
    resample: Resample
    mean: tuple[float, ...]
    std: tuple[float, ...]
    has_axes: bool
    root: Path | None = None
    max_decoded_pixels: int = _MAX_DECODED_PIXELS

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(0, placeholder=self.placeholder)
        check_at_least(
            1,
            patch_size=self.patch_size,
            merge_size=self.merge_size,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
            max_decoded_pixels=self.max_decoded_pixels,
        )
        if self.fixed_size is None:
            if self.min_pixels is None or self.max_pixels is None:
                raise DataError("images: want min_pixels and max_pixels, or fixed_size")
            if self.min_pixels > self.max_pixels:
                raise DataError(f"images: min_pixels: {self.min_pixels} is above max_pixels: {self.max_pixels}")
            if self.max_pixels < self.factor**2:
                raise DataError(f"images: max_pixels: {self.max_pixels} is less than a token, {self.factor}^2 pixels")
        elif min(self.fixed_size) < self.factor:
            raise DataError(f"images: the size {self.fixed_size} is less than a token, {self.factor}^2 pixels")
        if len(self.mean) != 3 or len(self.std) != 3 or not all(value > 0 for value in self.std):
            raise DataError(f"images: mean {self.mean} and std {self.std}: want three numbers each, std above 0")

    @property
    def factor(self) -> int:
        """The pixels on a side of the square that a token stands for."""
        return self.patch_size * self.merge_size

    def fingerprint(self) -> dict[str, JSON]:
        """The settings that determine sizes, tokens and sources, as a part of the key of prepared data."""
        return {
            "placeholder": self.placeholder,
            "sizes": [self.patch_size, self.merge_size, self.min_pixels, self.max_pixels],
            "fixed_size": None if self.fixed_size is None else [*self.fixed_size],
            "crops": self.crops,
            "root": None if self.root is None else str(self.root.resolve()),
        }

    def limited(self, min_pixels: int | None, max_pixels: int | None, root: Path | None) -> ImageSettings:
        """These settings with other limits of the resized image, and another root; None keeps each as it is.

        Raises DataError for limits of images that all have one size.
        """
        if self.fixed_size is not None and (min_pixels is not None or max_pixels is not None):
            height, width = self.fixed_size
            raise DataError(
                f"images: min_pixels and max_pixels have no effect: all images of this model have {height} x {width} "
                "pixels; remove them"
            )
        return replace(
            self,
            min_pixels=self.min_pixels if min_pixels is None else min_pixels,
            max_pixels=self.max_pixels if max_pixels is None else max_pixels,
            root=self.root if root is None else root,
        )


def has_image_processor(folder: Path) -> bool:
    """Whether a folder has a file with the settings of an image processor."""
    return any((folder / name).is_file() for name in _FILES)


@checked
def read_image_settings(folder: Path, *, placeholder: int, patch_size: int, has_axes: bool) -> ImageSettings:
    """The settings of the image processor in a model's folder.

    patch_size: that of the model, which the processor's must agree with if it has one. Raises DataError if there is no
    processor, or if it does what is not supported.
    """
    values, path = read_processor(folder)
    return settings_of(values, path, placeholder=placeholder, patch_size=patch_size, has_axes=has_axes)


def settings_of(
    values: Mapping[str, object], path: Path, *, placeholder: int, patch_size: int, has_axes: bool
) -> ImageSettings:
    """The settings of an image processor with these values, of the file `path`: see `read_image_settings`."""
    for name, wanted in (("do_resize", True), ("do_rescale", True), ("do_pad", False), ("do_image_splitting", False)):
        if values.get(name) not in (None, wanted):
            raise DataError(f"{path}: {name}: {values[name]!r} is not supported; supported: {wanted}")
    if abs(float(str(values.get("rescale_factor") or 1 / 255)) * 255 - 1) > 1e-3:
        raise DataError(f"{path}: rescale_factor: {values['rescale_factor']!r} is not supported; supported: 1/255")
    resample = values.get("resample", 3)
    if resample not in _RESAMPLES:
        raise DataError(f"{path}: resample: {resample!r} is not supported; supported: 2 (bilinear), 3 (bicubic)")
    normalizes = values.get("do_normalize") is not False
    common = {
        "placeholder": placeholder,
        "resample": _RESAMPLES[resample],
        "mean": _colors(values, "image_mean", path) if normalizes else (0.0,) * 3,
        "std": _colors(values, "image_std", path) if normalizes else (1.0,) * 3,
        "has_axes": has_axes,
    }
    size = values.get("size")
    size = size if isinstance(size, dict) else {}
    if values.get("merge_size") is None:
        fixed, crops = _fixed_size(values, size, path)
        return ImageSettings(
            **common,
            patch_size=patch_size,
            merge_size=1,
            min_pixels=None,
            max_pixels=None,
            fixed_size=fixed,
            crops=crops,
        )
    if _integer(values, "patch_size", path) != patch_size:
        raise DataError(f"{path}: patch_size: {values['patch_size']!r}, but that of the model is {patch_size}")
    limits = {
        "min_pixels": values.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels"),
        "max_pixels": values.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels"),
    }
    return ImageSettings(
        **common,
        patch_size=patch_size,
        merge_size=_integer(values, "merge_size", path),
        min_pixels=_integer(limits, "min_pixels", path),
        max_pixels=_integer(limits, "max_pixels", path),
        fixed_size=None,
        crops=False,
    )


def read_processor(folder: Path) -> tuple[Mapping[str, object], Path]:
    """The values of the image processor in a folder, and the file that has them. Raises DataError if there is none."""
    for name in _FILES:
        path = folder / name
        if not path.is_file():
            continue
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise DataError(f"{path} cannot be read as JSON: {error}") from error
        values = values.get("image_processor", values) if isinstance(values, dict) else values
        if isinstance(values, dict) and ("image_processor_type" in values or "size" in values):
            return values, path
    raise DataError(f"{folder} has no image processor: want {' or '.join(_FILES)}, as saved with the model")


def _fixed_size(values: Mapping[str, object], size: Mapping[str, object], path: Path) -> tuple[tuple[int, int], bool]:
    """(height, width) of all resized images, and whether they are cropped to it."""
    crops = bool(values.get("do_center_crop"))
    crop = values.get("crop_size")
    if crops and isinstance(crop, int):
        crop = {"height": crop, "width": crop}
    target = crop if crops and isinstance(crop, dict) else size
    height, width = _integer(target, "height", path), _integer(target, "width", path)
    if crops and size.get("shortest_edge") != min(height, width):
        raise DataError(
            f"{path}: size: {dict(size)!r} with a crop of {height} x {width} is not supported; supported: a "
            "shortest_edge as long as the shorter side of the crop"
        )
    return (height, width), crops


def _integer(values: Mapping[str, object], name: str, path: Path) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise DataError(f"{path}: {name}: {value!r}, want an integer")
    return value


def _colors(values: Mapping[str, object], name: str, path: Path) -> tuple[float, ...]:
    value = values.get(name)
    if not isinstance(value, list) or len(value) != 3:
        raise DataError(f"{path}: {name}: {value!r}, want three numbers")
    return tuple(float(each) for each in value)
