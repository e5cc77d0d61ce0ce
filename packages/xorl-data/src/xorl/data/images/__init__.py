"""Images: from a row's source to patches of pixels, and the tokens that stand for them.

Nothing here imports Pillow before an image is opened.
"""

from xorl.data.images.batch import Images
from xorl.data.images.settings import (
    ImageSettings,
    has_image_processor,
    read_image_settings,
    read_processor,
    settings_of,
)

__all__ = ["ImageSettings", "Images", "has_image_processor", "read_image_settings", "read_processor", "settings_of"]
