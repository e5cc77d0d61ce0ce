"""Image files as pixels: kinds of files and of colors, orientation, the order of patches, and damaged files."""

import io
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from pictures import FIXED, SETTINGS, picture, picture_of
from xorl.data import DataError
from xorl.data.images.pixels import decoder_digest, read_header, read_patches
from xorl.data.images.size import Size, grid_of, num_tokens

Image = pytest.importorskip("PIL.Image")  # an extra


def test_orientation():
    """Catches turned photos whose tokens are counted by the size before."""
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), np.uint8)
    upright = Image.fromarray(pixels)
    turns = {1: None, 3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
    turns |= {2: Image.Transpose.FLIP_LEFT_RIGHT, 4: Image.Transpose.FLIP_TOP_BOTTOM}
    turns |= {5: Image.Transpose.TRANSPOSE, 7: Image.Transpose.TRANSVERSE}
    wanted = read_patches(picture_of(upright), SETTINGS)
    for orientation, turn in turns.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        content = picture_of(upright if turn is None else upright.transpose(turn), exif=exif)
        header = read_header(content, SETTINGS)
        assert (header.size, header.is_rotated) == ((16, 24), orientation != 1), orientation
        assert torch.equal(read_patches(content, SETTINGS), wanted), orientation


def upright(pixels):
    """The pixels [16, 24, 3] that patches were cut from."""
    return pixels.view(2, 3, 2, 2, 3, 4, 4).permute(0, 2, 5, 1, 3, 6, 4).reshape(16, 24, 3).numpy()


GENERATOR = np.random.default_rng(0)
COLORS = GENERATOR.integers(0, 256, (16, 24, 3), np.uint8)
OPACITY = GENERATOR.integers(0, 256, (16, 24), np.uint8)
NUMBERS = GENERATOR.integers(0, 4, (16, 24), np.uint8)
PALETTE = GENERATOR.integers(0, 256, (4, 3), np.uint8)


def on_white(colors, opacity):
    share = opacity[..., None] / 255
    return colors * share + 255 * (1 - share)


def numbered():
    image = Image.fromarray(NUMBERS, "P")
    image.putpalette(PALETTE.flatten().tolist())
    return image


def png_of_16_bits(kind, values) -> bytes:
    """A PNG of 8-bit values, with 16 bits for each, as Pillow writes grey ones alone. kind: the format's color type."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    height, width = values.shape[:2]
    rows = b"".join(b"\0" + (row.astype(np.uint16) * 257).astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


# By label: a function that makes a file, its pixels after decoding, and whether it counts as transparent.
KINDS = {
    "RGB": (lambda: picture_of(Image.fromarray(COLORS)), COLORS, False),
    "RGBA": (lambda: picture_of(Image.fromarray(np.dstack([COLORS, OPACITY]))), on_white(COLORS, OPACITY), True),
    "RGB, one color transparent": (
        lambda: picture_of(Image.fromarray(COLORS), transparency=tuple(COLORS[3, 5].tolist())),
        np.where((COLORS[3, 5] == COLORS).all(-1, keepdims=True), 255, COLORS),
        True,
    ),
    "grey": (lambda: picture_of(Image.fromarray(OPACITY)), np.repeat(OPACITY[..., None], 3, -1), False),
    "grey, transparent": (
        lambda: picture_of(Image.fromarray(np.dstack([COLORS[..., 0], OPACITY]), "LA")),
        on_white(np.repeat(COLORS[..., :1], 3, -1), OPACITY),
        True,
    ),
    "black and white": (
        lambda: picture_of(Image.fromarray(OPACITY > 99)),
        np.repeat((OPACITY > 99)[..., None] * 255, 3, -1),
        False,
    ),
    "palette": (lambda: picture_of(numbered()), PALETTE[NUMBERS], False),
    "palette, one color transparent": (
        lambda: picture_of(numbered(), transparency=2),
        np.where((NUMBERS == 2)[..., None], 255, PALETTE[NUMBERS]),
        True,
    ),
    "palette, opacity by color": (
        lambda: picture_of(numbered(), transparency=bytes([255, 128, 0, 64])),
        on_white(PALETTE[NUMBERS], np.array([255, 128, 0, 64])[NUMBERS]),
        True,
    ),
    "16 bits a color": (lambda: png_of_16_bits(2, COLORS), COLORS, False),
    "16 bits a color, transparent": (
        lambda: png_of_16_bits(6, np.dstack([COLORS, OPACITY])),
        on_white(COLORS, OPACITY),
        True,
    ),
    # Ink: the more, the darker.
    "CMYK": (
        lambda: picture_of(Image.fromarray(np.full((16, 24, 4), (255, 0, 128, 0), np.uint8), "CMYK"), "JPEG"),
        np.broadcast_to((0, 255, 127), (16, 24, 3)),
        False,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_color_is_as_it_looks_on_white(kind):
    """Catches black where an image is transparent, numbers of a palette as colors, and inverted or clipped colors."""
    write, wanted, is_transparent = KINDS[kind]
    content = write()
    assert read_header(content, SETTINGS).is_transparent == is_transparent
    found = upright(read_patches(content, SETTINGS)).astype(int)
    assert np.abs(found - wanted).max() <= (3 if kind == "CMYK" else 1)


def test_grey_of_16_bits_is_refused():
    """Catches values above 255 that are clipped to white."""
    with pytest.raises(DataError, match="values of the kind 'I;16'; convert it to 8 bits a color"):
        read_header(picture_of(Image.fromarray(OPACITY.astype(np.uint16) * 257)), SETTINGS)


def test_animations_and_large_images_are_refused():
    """Catches the first frame in place of an animation, and an image that is decoded before its size is known."""
    still = Image.fromarray(COLORS)
    animated = io.BytesIO()
    still.save(animated, "PNG", save_all=True, append_images=[still.transpose(Image.Transpose.ROTATE_180)])
    with pytest.raises(DataError, match="animated"):
        read_header(animated.getvalue(), SETTINGS)
    with pytest.raises(DataError, match="more than the limit of 100"):
        read_header(picture(), replace(SETTINGS, max_decoded_pixels=100))


def test_patches_are_in_the_order_of_tokens():
    """Catches rows and columns of patches, or of tokens, that are exchanged, and resizing to the same size."""
    rows, columns = np.meshgrid(np.arange(16), np.arange(24), indexing="ij")
    pixels = np.stack([rows, columns, np.full_like(rows, 7)], -1).astype(np.uint8)
    patches = read_patches(picture_of(Image.fromarray(pixels)), SETTINGS).reshape(-1, 3, 4, 4)
    # Tokens of 8 x 8 pixels by rows, and in each its 4 patches by rows.
    corners = [
        (8 * y + 4 * dy, 8 * x + 4 * dx) for y in range(2) for x in range(3) for dy in range(2) for dx in range(2)
    ]
    assert [tuple(patch[:2, 0, 0].tolist()) for patch in patches] == corners
    assert patches[:, 2].eq(7).all()
    assert len(decoder_digest()) == 16


def test_images_of_a_fixed_size_are_stretched_or_cut():
    """Catches a crop of the corner, or a resize of the longer side."""
    pixels = np.zeros((12, 36, 3), np.uint8)
    pixels[:, 12:24] = 200
    content = picture_of(Image.fromarray(pixels))
    assert read_patches(content, replace(FIXED, crops=True)).eq(200).all()
    stretched = read_patches(content, FIXED)
    assert stretched.shape == (9, 48)
    assert not stretched.eq(200).all()
    assert grid_of(Size(12, 36), FIXED) == (3, 3)
    assert num_tokens(Size(3, 3), FIXED) == 9


def test_patches_are_those_of_a_convolution_if_they_do_not_fill_the_image():
    """Catches a refusal, or shifted patches, for towers such as 384 pixels in patches of 14."""
    settings = replace(FIXED, fixed_size=(14, 15))
    pixels = np.random.default_rng(0).integers(0, 256, (14, 15, 3), np.uint8)
    patches = read_patches(picture_of(Image.fromarray(pixels)), settings)
    windows = torch.from_numpy(pixels).permute(2, 0, 1)[None].double()
    expected = torch.nn.functional.unfold(windows, settings.patch_size, stride=settings.patch_size)[0].t()  # [9, 48]
    assert torch.equal(patches.double(), expected)
    assert grid_of(Size(14, 15), settings) == (3, 3)
    with pytest.raises(DataError, match="less than a token"):
        replace(FIXED, fixed_size=(3, 12))
