"""The image encoder of a model, as every family's config.json is translated to, and the images that it encodes.

Shapes: T tokens, P patches, C values of a patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from xorl.core.nn.layers import ACTIVATIONS

NUM_COLORS = 3


@dataclass(frozen=True)
class ImageConfig:
    """A transformer over the patches of each image, and a projection of its outputs to the width of the decoder.

    Attributes:
        placeholder: the id of the token that stands for a part of an image.
        patch_size: the pixels on a side of a patch.
        frames: how often a patch is repeated, for encoders of videos.
        merge_size: the patches on a side of the square that becomes one token.
        width, num_heads, mlp_width: of a block.
        activation: of the feed-forward blocks.
        num_blocks: how many there are.
        side: the learned positions on a side of their square grid; positions of patches are interpolated between them.
        rope_theta: the base of the rotation by rows and columns; None: there is no rotation.
        out_width: the width of the decoder.
        taps: the blocks after which features are added to the hidden states after the decoder's first layers, one layer
            each, at the tokens of images (arXiv:2406.04334).
        eps: of the norms.
        patch_bias: whether the embedding of patches has a bias.
        class_token: whether a learned token precedes the patches of each image, and a norm the blocks. It has a learned
            position of its own, the first one, and its output is not used.
        projector_activation: of a plain projector of two layers; None: the projector normalises and joins the patches
            of each token.
        projector_bias: whether a plain projector has biases.
    """

    placeholder: int
    patch_size: int
    frames: int
    merge_size: int
    width: int
    num_heads: int
    mlp_width: int
    activation: str
    num_blocks: int
    side: int
    rope_theta: float | None
    out_width: int
    taps: tuple[int, ...]
    eps: float
    patch_bias: bool = True
    class_token: bool = False
    projector_activation: str | None = None
    projector_bias: bool = True

    def __post_init__(self) -> None:
        multiple = 1 if self.rope_theta is None else 4
        if self.width % self.num_heads or self.head_dim % multiple:
            raise ValueError(
                f"an encoder {self.width} wide cannot have {self.num_heads} heads: each needs a multiple of {multiple} "
                "channels"
            )
        for name in (self.activation, self.projector_activation):
            if name is not None and name not in ACTIVATIONS:
                raise ValueError(f"activation: {name!r} is not one of {', '.join(map(repr, ACTIVATIONS))}")
        if len(set(self.taps)) < len(self.taps) or not all(0 <= tap < self.num_blocks for tap in self.taps):
            raise ValueError(f"taps: {self.taps} are not different blocks of {self.num_blocks}")

    @property
    def head_dim(self) -> int:
        """The channels of a head."""
        return self.width // self.num_heads

    @property
    def is_fixed(self) -> bool:
        """Whether all images have the grid of the learned positions."""
        return self.rope_theta is None

    @property
    def num_positions(self) -> int:
        """The learned positions, with that of the class token."""
        return self.side**2 + self.class_token

    @property
    def merged_width(self) -> int:
        """The width of all patches of a token together."""
        return self.width * self.merge_size**2


@dataclass(frozen=True)
class ImageInput:
    """The images of a row, and where their features are to stand in it.

    A row without an image has one all the same, of which no feature is used: where encoders are sharded, every rank
    has to encode.

    Attributes:
        patches: [P, C] uint8, by color, row and column; of all images, those of a token together.
        grids: (height, width) of each image in patches, on the host.
        places: [n] int64, the tokens of the row, or of this rank's part of it, that are parts of images.
        features: [n] int64, for each of `places`, the index of its feature among those of all images.
        mean, std: by color, of values between 0 and 1; patches are normalised to (value - mean) / std.
    """

    patches: Tensor
    grids: Sequence[tuple[int, int]]
    places: Tensor
    features: Tensor
    mean: Sequence[float]
    std: Sequence[float]
