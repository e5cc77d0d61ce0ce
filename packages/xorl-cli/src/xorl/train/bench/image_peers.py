"""Peers on models that read images: prepares transformers' model, its inputs for packed rows, and its fast paths.

Packed rows need positions in four rows, of which the first separates documents. The patches are normalised on the
device, which transformers' own processors do on the host, in fp32 and for both frames.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xorl.config.local import TrainConfig
from xorl.core.models.flops import image_flops
from xorl.core.models.image_config import ImageConfig
from xorl.data import PackedBatch
from xorl.kernels.attention import AttentionFn, AttentionRequest, AttentionSpec, resolve_attention
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.registry import AUTO
from xorl.train.layer_kernels import compute_dtype

# transformers calls an attention with "flash" in its name once for all images, and others once for each.
_IMAGE_ATTENTION = "xorl_flash_images"
LAYOUT = "xorl_image_layout"


def refusal(images: ImageConfig) -> str | None:
    """Why models with this encoder have no peers; None if they do."""
    return "models composed of a decoder and a tower have no peers yet" if images.is_fixed else None


class ImagePeer:
    """A peer's part of a model with the encoder `images`."""

    def __init__(self, images: ImageConfig, train: TrainConfig, device: torch.device) -> None:
        self._images, self._train, self._device = images, train, device

    def prepare_(self, model: nn.Module, *, has_attention: bool) -> None:
        """Freeze what the options name, embed patches by a matrix product, and set the tower's attention.

        has_attention: whether that is xorl's, over all images at once, or transformers' own.
        """
        train, tower = self._train, model.get_submodule("model.visual")
        if train.freeze_encoders:
            tower.requires_grad_(False)
        for name, module in tower.named_children():
            if "merger" in name:
                module.requires_grad_(not train.freeze_projectors)
        if train.freeze_decoder:
            model.get_submodule("model.language_model").requires_grad_(False)
            model.get_submodule("lm_head").requires_grad_(False)
        embedding = tower.get_submodule("patch_embed")
        convolution = embedding.get_submodule("proj")

        def embed(values: Tensor) -> Tensor:
            # The convolution has windows that do not overlap, and is many times slower in bf16.
            weight, bias = convolution.get_parameter("weight"), convolution.get_parameter("bias")
            return F.linear(values.to(weight.dtype), weight.flatten(1), bias)

        embedding.forward = embed
        if has_attention:
            dtype, head_dim = compute_dtype(train), self._images.head_dim
            request = AttentionRequest(self._device.type, dtype, head_dim, None, causal=False)
            _register(resolve_attention(AUTO, request))
            model.set_attn_implementation({"vision_config": _IMAGE_ATTENTION})  # pyright: ignore[reportCallIssue]

    def arguments(self, batch: PackedBatch) -> dict[str, object]:
        """The arguments of the model for a packed row with images, or with none."""
        coordinates = batch.inputs["coordinates"].t()  # [3, T]
        found: dict[str, object] = {"position_ids": torch.cat([batch.positions[None], coordinates])[:, None]}
        given = batch.images
        if given is None or not given.num_images:
            return found
        mean, std = (torch.tensor(each, device=self._device)[:, None] for each in (given.mean, given.std))
        values = (given.patches.view(len(given.patches), 3, -1).float() / 255 - mean) / std
        frames = values[:, :, None].expand(-1, -1, self._images.frames, -1).flatten(1)
        whole = SequenceLayout.from_lengths([height * width for height, width in given.grids])
        cu_seqlens, positions = (each.to(self._device) for each in (whole.cu_seqlens, whole.positions))
        found[LAYOUT] = SequenceLayout(cu_seqlens, positions, whole.lengths)
        found["pixel_values"] = frames.to(compute_dtype(self._train))
        found["image_grid_thw"] = torch.tensor([[1, *grid] for grid in given.grids], device=self._device)
        return found

    def flops(self, grids: Sequence[tuple[int, int]]) -> float:
        """Floating-point operations of a step on images of these grids, as those of xorl are counted."""
        trains_tower, trains_projectors = not self._train.freeze_encoders, not self._train.freeze_projectors
        return image_flops(self._images, grids, trains_tower=trains_tower, trains_projectors=trains_projectors)


def _register(attention: AttentionFn) -> None:
    from transformers import AttentionInterface  # noqa: PLC0415  (takes seconds to import; only peers use it)

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, **options: object
    ) -> tuple[Tensor, None]:
        q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # [P, H, C]
        spec, layout = AttentionSpec(scaling, None, None, causal=False), options[LAYOUT]
        assert isinstance(layout, SequenceLayout), "given by `arguments`"
        return attention(q, k, v, layout, spec, None).unsqueeze(0), None

    AttentionInterface.register(_IMAGE_ATTENTION, attend)
