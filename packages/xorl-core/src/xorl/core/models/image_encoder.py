"""The image encoder: patches to features for the decoder's tokens, in rows of images of any size.

Shapes: P patches, D width, H heads, C channels of a head, M patches of a token, N tokens of images.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from xorl.core.models.image_config import NUM_COLORS, ImageConfig, ImageInput
from xorl.core.nn.layers import ACTIVATIONS, Embedding, Linear, PlainMLP
from xorl.core.nn.norms import LayerNorm, NormConfig
from xorl.core.nn.tensor import ALONE
from xorl.kernels.attention import AttentionFn, AttentionSpec
from xorl.kernels.copies import copy_to
from xorl.kernels.fused import HeadShape, RopeTables, reference
from xorl.kernels.layout import SequenceLayout

# How many grids have their tables cached; a table is small beside the features of one image.
_KEPT_GRIDS = 512


class ImageEncoder(nn.Module):
    """Encodes images, [P, values of a patch] -> [N, D of the decoder], and what is added after its first layers.

    Attributes:
        blocks: the units of sharding and of recomputation. Without trained parameters in them, they keep nothing for
            the backward pass.
    """

    def __init__(self, config: ImageConfig, attention: AttentionFn) -> None:
        super().__init__()
        self.config = config
        norm = NormConfig("layer", config.eps, bias=True)
        self.patches = PatchLinear(config)
        self.positions = Embedding(config.side**2, config.width)
        self.blocks = nn.ModuleList(EncoderBlock(config, norm, attention) for _ in range(config.num_blocks))
        self.projector = Merger(config, norm, norms_merged=False)
        self.taps = nn.ModuleList(Merger(config, norm, norms_merged=True) for _ in config.taps)

    @property
    def projectors(self) -> tuple[nn.Module, ...]:
        """The modules that map to the width of the decoder."""
        return self.projector, *self.taps

    @property
    def tower(self) -> tuple[nn.Module, ...]:
        """All other modules."""
        return self.patches, self.positions, *self.blocks

    def forward(self, images: ImageInput, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Features [N, D] in `dtype`, and those of each tap."""
        config, device = self.config, images.patches.device
        num_patches = sum(height * width for height, width in images.grids)
        wanted = num_patches, NUM_COLORS * config.patch_size**2
        if images.patches.shape != wanted:
            raise ValueError(
                f"images: the patches are {list(images.patches.shape)}, but the grids {list(images.grids)} have "
                f"{wanted[0]} patches of {wanted[1]} values"
            )
        is_frozen = not any(each.requires_grad for module in self.tower for each in module.parameters())
        tapped: list[tuple[int, Tensor]] = []
        with torch.no_grad() if is_frozen else nullcontext():
            hidden = self.patches(images, dtype) + self._positions(images.grids, device, dtype)
            layout = _layout([height * width for height, width in images.grids], device)
            rope = self._rope(images.grids, device)
            for index, block in enumerate(self.blocks):
                hidden = block(hidden, layout, *rope)
                if index in config.taps:
                    tapped.append((config.taps.index(index), hidden))
        return self.projector(hidden), [self.taps[number](output) for number, output in tapped]

    def placed(self, images: ImageInput, dtype: torch.dtype) -> PlacedFeatures:
        """The features of the tokens that stand for parts of images."""
        features, taps = self(images, dtype)
        return PlacedFeatures(images.places, features[images.features], [tap[images.features] for tap in taps])

    def _positions(self, grids: Sequence[tuple[int, int]], device: torch.device, dtype: torch.dtype) -> Tensor:
        """[P, D], between the four nearest learned ones."""
        tables = [_corners(grid, self.config.side, self.config.merge_size) for grid in grids]
        indices, weights = (copy_to(device, torch.cat(each)) for each in zip(*tables, strict=True))  # [P, 4]
        corners = self.positions(indices.flatten()).view(*indices.shape, -1)
        wide = torch.promote_types(dtype, torch.float32)
        return (corners.to(wide) * weights[..., None]).sum(1).to(dtype)

    def _rope(self, grids: Sequence[tuple[int, int]], device: torch.device) -> RopeTables:
        """Cosines and sines [P, C / 2]: half of the pairs rotate by the row, the others by the column."""
        places = torch.cat([_rows_and_columns(grid, self.config.merge_size) for grid in grids])  # [P, 2]
        size = self.config.head_dim // 2
        inv_freq = 1.0 / self.config.rope_theta ** (torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size)
        angles = copy_to(device, (places[..., None].float() * inv_freq).flatten(1))
        return angles.cos(), angles.sin()


class PlacedFeatures(NamedTuple):
    """The features of images at the tokens that stand for them, [n, D], and what is added after the first layers."""

    places: Tensor
    features: Tensor
    taps: Sequence[Tensor]


class PatchLinear(Linear):
    """The embedding of patches: a convolution whose windows do not overlap. [P, values] uint8 -> [P, D].

    Attributes:
        stored_shape: the shape of the weight in checkpoints, [D, colors, frames, rows, columns].
    """

    def __init__(self, config: ImageConfig) -> None:
        side, frames = config.patch_size, config.frames
        self.stored_shape = (config.width, NUM_COLORS, frames, side, side)
        super().__init__(NUM_COLORS * frames * side**2, config.width, bias=True)
        self.frames = frames

    def forward(self, images: ImageInput, dtype: torch.dtype) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Values are normalised in fp32 at least, whatever `dtype` is."""
        device, wide = images.patches.device, torch.promote_types(dtype, torch.float32)
        mean, std = (copy_to(device, torch.tensor(each, dtype=wide))[:, None] for each in (images.mean, images.std))
        values = images.patches.view(len(images.patches), NUM_COLORS, -1).to(wide)
        values = ((values / 255 - mean) / std).to(dtype)
        return super().forward(values[:, :, None].expand(-1, -1, self.frames, -1).flatten(1))


class EncoderBlock(nn.Module):
    """Attention of all patches of an image to each other, and a feed-forward block, each after a norm."""

    def __init__(self, config: ImageConfig, norm: NormConfig, attention: AttentionFn) -> None:
        super().__init__()
        self.norm1 = LayerNorm(config.width, norm)
        self.attention = EncoderAttention(config, attention)
        self.norm2 = LayerNorm(config.width, norm)
        self.mlp = PlainMLP(config.width, config.mlp_width, activation=config.activation, bias=True, ranks=ALONE)

    def forward(self, hidden: Tensor, layout: SequenceLayout, cos: Tensor, sin: Tensor) -> Tensor:
        hidden, normed = self.norm1(hidden)
        hidden, normed = self.norm2(self.attention(normed, layout, (cos, sin)), residual=hidden)
        return hidden + self.mlp(normed)


class EncoderAttention(nn.Module):
    """Attention inside each image, in all directions. [P, D] -> [P, D]"""

    def __init__(self, config: ImageConfig, attention: AttentionFn) -> None:
        super().__init__()
        self.shape = HeadShape(config.num_heads, config.num_heads, config.head_dim)
        self.spec = AttentionSpec(config.head_dim**-0.5, None, None, causal=False)
        self.attend = attention
        self.qkv = Linear(config.width, 3 * config.width, bias=True)
        self.out = Linear(config.width, config.width, bias=True)

    def forward(self, x: Tensor, layout: SequenceLayout, rope: RopeTables) -> Tensor:
        q, k, v = reference.split_heads((self.qkv(x),), self.shape, None, rope)  # [P, H, C]
        return self.out(self.attend(q, k, v, layout, self.spec, None).flatten(-2))


class Merger(nn.Module):
    """Joins the M patches of each token and projects them, [P, D] -> [P / M, D of the decoder].

    norms_merged: whether the joined patches are normalised, or each alone.
    """

    def __init__(self, config: ImageConfig, norm: NormConfig, *, norms_merged: bool) -> None:
        super().__init__()
        self.width, self.norms_merged = config.merged_width, norms_merged
        self.norm = LayerNorm(self.width if norms_merged else config.width, norm)
        self.up = Linear(self.width, self.width, bias=True)
        self.down = Linear(self.width, config.out_width, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.norms_merged:
            x = x.view(-1, self.width)
        _, x = self.norm(x)
        return self.down(ACTIVATIONS["gelu"](self.up(x.view(-1, self.width))))


def _layout(lengths: Sequence[int], device: torch.device) -> SequenceLayout:
    whole = SequenceLayout.from_lengths(lengths)
    if device.type == "cpu":
        return whole
    return SequenceLayout(copy_to(device, whole.cu_seqlens), copy_to(device, whole.positions), whole.lengths)


@lru_cache(_KEPT_GRIDS)
def _rows_and_columns(grid: tuple[int, int], merge: int) -> Tensor:
    """[P, 2]: the row and column of each patch, in the order of tokens."""
    height, width = grid
    if height % merge or width % merge:
        raise ValueError(f"images: a grid of {height} x {width} patches cannot be merged by {merge} x {merge}")
    rows, columns = torch.meshgrid(torch.arange(height, device="cpu"), torch.arange(width, device="cpu"), indexing="ij")
    places = torch.stack([rows, columns], -1).view(height // merge, merge, width // merge, merge, 2)
    return places.transpose(1, 2).reshape(-1, 2)


@lru_cache(_KEPT_GRIDS)
def _corners(grid: tuple[int, int], side: int, merge: int) -> tuple[Tensor, Tensor]:
    """[P, 4] each: the learned positions around each patch, and their weights. The corners of both squares agree."""
    places = _rows_and_columns(grid, merge)
    axes: list[tuple[Tensor, Tensor]] = []
    for axis, size in enumerate(grid):
        point = places[:, axis].float() * (side - 1) / max(size - 1, 1)
        first = point.floor().long().clamp(max=side - 1)
        fraction = point - first
        second = (first + 1).clamp(max=side - 1)
        axes.append((torch.stack([first, second], -1), torch.stack([1 - fraction, fraction], -1)))
    (rows, row_weights), (columns, column_weights) = axes
    indices = rows[:, :, None] * side + columns[:, None, :]
    return indices.flatten(1), (row_weights[:, :, None] * column_weights[:, None, :]).flatten(1)
