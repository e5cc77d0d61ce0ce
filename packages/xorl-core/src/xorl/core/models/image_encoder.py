"""The image encoder: patches to features for the decoder's tokens, in rows of images of any size.

A class token, where a tower has one, precedes the patches of its image in attention and in blocks.

Shapes: P patches, D width, H heads, C channels of a head, M patches of a token, N tokens of images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from xorl.core.models.image_config import NUM_COLORS, ImageConfig, ImageInput
from xorl.core.nn.layers import ACTIVATIONS, Embedding, Linear, PlainMLP
from xorl.core.nn.norms import LayerNorm, NormConfig
from xorl.core.nn.roles import Role
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
        self.positions = Embedding(config.num_positions, config.width)
        self.class_token = ClassToken(config.width) if config.class_token else None
        self.norm = LayerNorm(config.width, norm) if config.class_token else None
        self.blocks = nn.ModuleList(EncoderBlock(config, norm, attention) for _ in range(config.num_blocks))
        is_plain = config.projector_activation is not None
        self.projector = Projector(config) if is_plain else Merger(config, norm, norms_merged=False)
        self.taps = nn.ModuleList(Merger(config, norm, norms_merged=True) for _ in config.taps)

    @property
    def projectors(self) -> tuple[nn.Module, ...]:
        """The modules that map to the width of the decoder."""
        return self.projector, *self.taps

    @property
    def tower(self) -> tuple[nn.Module, ...]:
        """All other modules."""
        led = () if self.class_token is None or self.norm is None else (self.class_token, self.norm)
        return self.patches, self.positions, *led, *self.blocks

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
            lengths = [height * width for height, width in images.grids]
            rope = None if config.rope_theta is None else self._rope(images.grids, device, config.rope_theta)
            kept = None
            if self.class_token is not None and self.norm is not None:
                kept = copy_to(device, _places_of_patches(tuple(lengths)))
                lengths = [length + 1 for length in lengths]
                first = self.class_token(self.positions(kept.new_zeros(1)), dtype)
                hidden = first.expand(sum(lengths), -1).index_copy(0, kept, hidden)
                _, hidden = self.norm(hidden)
            layout = _layout(lengths, device)
            for index, block in enumerate(self.blocks):
                hidden = block(hidden, layout, rope)
                if index in config.taps:
                    tapped.append((config.taps.index(index), hidden))
            if kept is not None:
                hidden = hidden.index_select(0, kept)
        return self.projector(hidden), [self.taps[number](output) for number, output in tapped]

    def placed(self, images: ImageInput, dtype: torch.dtype) -> PlacedFeatures:
        """The features of the tokens that stand for parts of images."""
        features, taps = self(images, dtype)
        return PlacedFeatures(images.places, features[images.features], [tap[images.features] for tap in taps])

    def _positions(self, grids: Sequence[tuple[int, int]], device: torch.device, dtype: torch.dtype) -> Tensor:
        """[P, D], between the four nearest learned ones."""
        tables = [_corners(grid, self.config.side, self.config.merge_size) for grid in grids]
        indices, weights = (copy_to(device, torch.cat(each)) for each in zip(*tables, strict=True))  # [P, 4]
        indices = indices + self.config.class_token
        corners = self.positions(indices.flatten()).view(*indices.shape, -1)
        wide = torch.promote_types(dtype, torch.float32)
        return (corners.to(wide) * weights[..., None]).sum(1).to(dtype)

    def _rope(self, grids: Sequence[tuple[int, int]], device: torch.device, theta: float) -> RopeTables:
        """Cosines and sines [P, C / 2]: half of the pairs rotate by the row, the others by the column."""
        places = torch.cat([_rows_and_columns(grid, self.config.merge_size) for grid in grids])  # [P, 2]
        size = self.config.head_dim // 2
        inv_freq = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size)
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
        stored_shape: the shape of the weight in checkpoints, [D, colors, frames, rows, columns], or without frames.
    """

    def __init__(self, config: ImageConfig) -> None:
        side, frames = config.patch_size, config.frames
        self.stored_shape = (config.width, NUM_COLORS, *([frames] if frames > 1 else []), side, side)
        super().__init__(NUM_COLORS * frames * side**2, config.width, bias=config.patch_bias)
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

    def forward(self, hidden: Tensor, layout: SequenceLayout, rope: RopeTables | None) -> Tensor:
        hidden, normed = self.norm1(hidden)
        hidden, normed = self.norm2(self.attention(normed, layout, rope), residual=hidden)
        return hidden + self.mlp(normed)


class EncoderAttention(nn.Module):
    """Attention inside each image, in all directions. [P, D] -> [P, D]"""

    def __init__(self, config: ImageConfig, attention: AttentionFn) -> None:
        super().__init__()
        self.shape = HeadShape(config.num_heads, config.num_heads, config.head_dim)
        self.spec = AttentionSpec(config.head_dim**-0.5, None, None, causal=False)
        self.attend = attention
        self.qkv_proj = Linear(config.width, 3 * config.width, bias=True)
        self.out = Linear(config.width, config.width, bias=True)

    @property
    def stacked_rows(self) -> Mapping[str, Sequence[int]]:
        """By name of each projection that stacks several matrices: the number of rows of each of them."""
        return {"qkv_proj": self.shape.row_counts}

    def forward(self, x: Tensor, layout: SequenceLayout, rope: RopeTables | None) -> Tensor:
        q, k, v = reference.split_heads((self.qkv_proj(x),), self.shape, None, rope)  # [P, H, C]
        return self.out(self.attend(q, k, v, layout, self.spec, None).flatten(-2))


class ClassToken(nn.Module):
    """The class token before the patches of an image, [1, D]."""

    roles: ClassVar[Mapping[str, Role]] = MappingProxyType({"class_embedding": "embedding"})

    def __init__(self, width: int) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.empty(width))

    def forward(self, position: Tensor, dtype: torch.dtype) -> Tensor:
        return self.class_embedding.to(dtype) + position.to(dtype)


class Projector(nn.Module):
    """Projects each patch, [P, D] -> [P, D of the decoder]."""

    def __init__(self, config: ImageConfig) -> None:
        super().__init__()
        assert config.projector_activation is not None
        self.up = Linear(config.width, config.out_width, bias=config.projector_bias)
        self.activation = ACTIVATIONS[config.projector_activation]
        self.down = Linear(config.out_width, config.out_width, bias=config.projector_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


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
def _places_of_patches(lengths: Sequence[int]) -> Tensor:
    """[P]: the places of patches in a row in which each image begins with a class token."""
    number_of_image = torch.arange(len(lengths), device="cpu").repeat_interleave(torch.tensor(lengths, device="cpu"))
    return torch.arange(sum(lengths), device="cpu") + number_of_image + 1


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
