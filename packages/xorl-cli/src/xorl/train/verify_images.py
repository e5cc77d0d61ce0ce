"""Random images in the documents with which layouts are verified, for models that read images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from xorl.data.batch import IGNORE, Document
from xorl.data.images import ImageSettings
from xorl.data.images.batch import DocumentImages
from xorl.data.images.size import Size
from xorl.data.images.source import ImageSource
from xorl.data.images.table import StoredImage
from xorl.train.architecture import Architecture

# Upper limits for a small encoder, by key of vision_config. Heads divide the width.
_CUT: Mapping[str, int] = {
    "depth": 4,
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "num_attention_heads": 4,
}
# The patches on a side of images that all have one size.
_CUT_SIDE = 4


def with_random_images(architecture: Architecture) -> Architecture:
    """The architecture with settings of images, if it reads any, that need no image processor."""
    images = architecture.config.images
    if images is None:
        return architecture
    side = images.side * images.patch_size
    settings = ImageSettings(
        placeholder=images.placeholder,
        patch_size=images.patch_size,
        merge_size=images.merge_size,
        min_pixels=None if images.is_fixed else (images.patch_size * images.merge_size) ** 2,
        max_pixels=None if images.is_fixed else (images.patch_size * images.merge_size) ** 2,
        fixed_size=(side, side) if images.is_fixed else None,
        crops=False,
        resample="bicubic",
        mean=(0.5, 0.4, 0.3),
        std=(0.5, 0.25, 0.3),
        has_axes=any(each.rope is not None and bool(each.rope.axes) for each in architecture.config.attentions),
    )
    return replace(architecture, images=settings)


def with_images(document: Document, settings: ImageSettings, index: int) -> Document:
    """A document with an image at its beginning, its end or between, by `index`; none for every fourth."""
    if index % 4 == 3:
        return document
    generator, merge = np.random.default_rng(index), settings.merge_size
    height, width = (int(side) * merge for side in generator.integers(1, 4, 2))
    grid = Size(height, width)
    if settings.fixed_size is not None:
        grid = Size(*settings.fixed_size).divided(settings.patch_size)
    num_tokens, start = grid.area // merge**2, (0, len(document.input_ids) // 2, len(document.input_ids))[index % 4]
    patches = generator.integers(0, 256, (grid.area, 3 * settings.patch_size**2), np.uint8)
    stored = StoredImage(ImageSource(None, b""), b"", start, num_tokens, grid, grid)
    ids, labels = (
        np.concatenate([values[:start], np.full(num_tokens, filling, values.dtype), values[start:]])
        for values, filling in ((document.input_ids, settings.placeholder), (document.labels, IGNORE))
    )
    images = DocumentImages([torch.from_numpy(patches)], [stored])
    return Document(ids, labels, document.columns, images)


def cut_images(hf_config: Mapping[str, object], cut: Mapping[str, object], vocab_size: int) -> dict[str, object]:
    """The entries of a config.json that make its image encoder small, beside those of `cut`, which do its decoder."""
    vision = hf_config["vision_config"]
    assert isinstance(vision, Mapping), "a model that reads images has it"
    found = {
        key: min(value, _CUT[key]) if key in _CUT and isinstance(value, int) else value for key, value in vision.items()
    }
    if "depth" in vision:
        taps = vision.get("deepstack_visual_indexes")
        found["deepstack_visual_indexes"] = list(range(len(taps) if isinstance(taps, list) else 3))
        text = hf_config["text_config"]
        assert isinstance(text, Mapping), "its decoder is inside"
        found["out_hidden_size"] = cut.get("hidden_size", text["hidden_size"])
    else:
        found["image_size"] = _CUT_SIDE * int(str(vision["patch_size"]))
    placeholders = {key: vocab_size - 1 for key in ("image_token_id", "image_token_index") if key in hf_config}
    return {"vision_config": found, **placeholders}
