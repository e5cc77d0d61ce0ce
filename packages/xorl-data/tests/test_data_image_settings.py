"""Settings of images, as the folders of models have them, and what text does not pay for them."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from pictures import FIXED, PLACEHOLDER, SETTINGS
from xorl.data import DataError
from xorl.data.images import read_image_settings


def write_processor(folder, name="preprocessor_config.json", **changes):
    values = {
        "image_processor_type": "AnImageProcessor",
        "patch_size": 4,
        "merge_size": 2,
        "size": {"shortest_edge": 128, "longest_edge": 1024},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_convert_rgb": True,
        **changes,
    }
    values = {key: value for key, value in values.items() if value is not ...}
    folder.mkdir(exist_ok=True)
    nested = name == "processor_config.json"
    (folder / name).write_text(json.dumps({"image_processor": values} if nested else values))
    return folder


def settings_in(folder):
    return read_image_settings(folder, placeholder=PLACEHOLDER, patch_size=4, has_axes=True)


def test_settings_are_those_of_the_model_folder(tmp_path):
    """Catches a limit in one of its spellings that is ignored."""
    assert settings_in(write_processor(tmp_path)) == SETTINGS
    assert settings_in(write_processor(tmp_path, min_pixels=256)).min_pixels == 256
    for file in tmp_path.iterdir():
        file.unlink()
    assert settings_in(write_processor(tmp_path, "processor_config.json")) == SETTINGS
    clip = {"merge_size": ..., "do_center_crop": True, "crop_size": {"height": 12, "width": 12}}
    fixed = settings_in(write_processor(tmp_path, size={"shortest_edge": 12}, **clip))
    assert fixed == replace(FIXED, crops=True, has_axes=True)
    limited = SETTINGS.limited(256, None, tmp_path)
    assert (limited.min_pixels, limited.max_pixels, limited.root) == (256, 1024, tmp_path)
    with pytest.raises(DataError, match="min_pixels and max_pixels have no effect"):
        fixed.limited(256, None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_resize": False}, "do_resize: False is not supported"),
        ({"rescale_factor": 0.5}, "rescale_factor: 0.5 is not supported"),
        ({"resample": 1}, "resample: 1 is not supported"),
        ({"patch_size": 14}, "patch_size: 14, but that of the model is 4"),
        ({"size": {"height": 7}}, "min_pixels: None, want an integer"),
        ({"image_mean": 0.5}, "image_mean: 0.5, want three numbers"),
        ({"do_pad": True}, "do_pad: True is not supported"),
    ],
)
def test_processors_that_do_more_are_refused(tmp_path, changes, message):
    """Catches a step of the processor that is left out."""
    with pytest.raises(DataError, match=message):
        settings_in(write_processor(tmp_path, **changes))


def test_text_needs_no_pillow():
    """Catches an import that every run of text pays for, and that fails where the extra is not installed."""
    code = (
        "import sys; import xorl.data, xorl.data.images.batch, xorl.data.images.expand; sys.exit('PIL' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
