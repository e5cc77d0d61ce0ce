"""Patches and numbers of tokens are those of transformers' image processors.

Of their two implementations, the one with torchvision computes the same values as xorl. torchvision is not installed
here: `uv run --with torchvision pytest tests/golden/test_image_processors.py`.
"""

import io
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, BaseImageProcessor

from xorl.data import DataError
from xorl.data.images import ImageSettings, read_image_settings
from xorl.data.images.pixels import read_patches
from xorl.data.images.size import Size, grid_of, num_tokens, resized

HAS_TORCHVISION = find_spec("torchvision") is not None
MEAN, STD = [0.48, 0.45, 0.4], [0.26, 0.25, 0.27]
# As in the folders of models: (values of the processor, size of a patch of the model).
PROCESSORS: dict[str, tuple[dict[str, object], int]] = {
    "grid": (
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 16,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        },
        16,
    ),
    "small grid": (
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 14,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "min_pixels": 3136,
            "max_pixels": 60000,
        },
        14,
    ),
    "crop": (
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 112},
            "do_center_crop": True,
            "crop_size": {"height": 112, "width": 112},
        },
        14,
    ),
    "stretch": ({"image_processor_type": "SiglipImageProcessor", "size": {"height": 112, "width": 112}}, 14),
}
SIZES = [(64, 64), (224, 224), (150, 224), (400, 300), (33, 500), (512, 90), (257, 255), (1, 150), (640, 480), (31, 97)]
SIZES += [(112, 112), (300, 200)]


def load(name: str, folder: Path) -> tuple[ImageSettings, BaseImageProcessor]:
    values, patch_size = PROCESSORS[name]
    text = json.dumps({**values, "image_mean": MEAN, "image_std": STD, "resample": 3})
    (folder / "preprocessor_config.json").write_text(text)
    settings = read_image_settings(folder, placeholder=0, patch_size=patch_size, has_axes=False)
    return settings, AutoImageProcessor.from_pretrained(folder)


def picture(size: Size, seed: int) -> Image.Image:
    """Smooth colors with noise, as in a photo."""
    generator = np.random.default_rng(seed)
    rows, columns = np.meshgrid(np.linspace(0, 9, size.height), np.linspace(0, 7, size.width), indexing="ij")
    values = np.stack([np.sin(rows + phase) + np.cos(columns * phase) for phase in (1, 2, 3)], -1)
    values = values * 60 + 128 + generator.normal(0, 12, values.shape)
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def expected_patches(pixels: Tensor, settings: ImageSettings) -> Tensor:
    """[P, 3, p, p], of a processor's values, which repeat the image for a second frame or are not cut."""
    side = settings.patch_size
    if pixels.dim() == 2:
        frames = pixels.view(len(pixels), 3, 2, side, side)
        assert torch.equal(frames[:, :, 0], frames[:, :, 1])
        return frames[:, :, 0]
    height, width = (edge // side for edge in pixels.shape[-2:])
    cut = pixels[0].view(3, height, side, width, side)
    return cut.permute(1, 3, 0, 2, 4).reshape(height * width, 3, side, side)


@pytest.mark.parametrize("name", PROCESSORS)
def test_patches_are_those_of_the_processor(tmp_path: Path, name: str) -> None:
    """Catches another filter, rounding, order of patches or of colors, a resize of floats, and a second resize."""
    settings, processor = load(name, tmp_path)
    scale, shift = torch.tensor(STD)[:, None, None], torch.tensor(MEAN)[:, None, None]
    for seed, (width, height) in enumerate(SIZES):
        image = picture(Size(height, width), seed)
        file = io.BytesIO()
        image.save(file, "PNG")
        patches = read_patches(file.getvalue(), settings).view(-1, 3, settings.patch_size, settings.patch_size)
        found = processor(images=[image], return_tensors="pt")
        wanted = expected_patches(torch.as_tensor(found["pixel_values"]), settings)
        assert patches.shape == wanted.shape, (name, width, height)
        if HAS_TORCHVISION:
            torch.testing.assert_close((patches / 255 - shift) / scale, wanted, atol=1e-5, rtol=0)
        else:
            # Pillow's filter rounds in other places.
            difference = patches - (wanted * scale + shift) * 255
            assert difference.abs().max() < 3.01, (name, width, height)
            assert difference.abs().mean() < 0.3, (name, width, height)


@pytest.mark.parametrize("name", ["grid", "small grid"])
def test_numbers_of_tokens_are_those_of_the_processor(tmp_path: Path, name: str) -> None:
    """Catches a limit on pixels that is applied to other sizes, and rounding of halves up."""
    settings, processor = load(name, tmp_path)
    generator = np.random.default_rng(0)
    sizes = [Size(*map(int, pair)) for pair in generator.integers(1, 3000, (200, 2))]
    sizes += [Size(16 * side, 48) for side in range(1, 40)]
    for size in sizes:
        if max(size) > 200 * min(size):
            with pytest.raises(DataError, match="at most 200 times"):
                resized(size, settings)
            continue
        wanted = processor.get_number_of_image_patches(size.height, size.width)
        grid = grid_of(size, settings)
        assert (grid.area, num_tokens(grid, settings)) == (wanted, wanted // 4), size


def test_known_numbers_of_tokens(tmp_path: Path) -> None:
    """Catches both this and the processor's arithmetic changing."""
    settings, _ = load("grid", tmp_path)
    known = {(224, 224): 64, (150, 224): 70, (400, 300): 108}
    for (width, height), wanted in known.items():
        assert num_tokens(grid_of(Size(height, width), settings), settings) == wanted
