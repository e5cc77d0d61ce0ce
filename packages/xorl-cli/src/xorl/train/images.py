"""Models that read images: how their data is read, which parts are trained and how fast, and what is not supported."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from xorl.ckpt.layout import JSON
from xorl.config.data import DataConfig
from xorl.config.local import LoraConfig, TrainConfig
from xorl.config.options import changed_options, yaml_text
from xorl.core.models import Decoder, DecoderConfig
from xorl.core.models.flops import image_flops, training_flops
from xorl.core.models.image_config import NUM_COLORS, ImageInput
from xorl.data import DataError
from xorl.data.batch import COORDINATES
from xorl.data.documents import PreparedDocuments
from xorl.data.images import ImageSettings, has_image_processor, read_processor, settings_of
from xorl.data.images.pixels import decoder_digest
from xorl.data.packing import Bins
from xorl.kernels.layout import SequenceLayout
from xorl.train.architecture import Architecture
from xorl.train.compose import OPTION

logger = logging.getLogger(__name__)

# Options that only models with an image encoder have.
TRAIN_OPTIONS = ("freeze_encoders", "freeze_projectors", "freeze_decoder", "encoder_lr", "projector_lr")
ENCODER_AND_DECODER = ("freeze_encoders", "freeze_decoder")
DATA_OPTIONS = ("image_min_pixels", "image_max_pixels", "image_root")
# The key in a checkpoint's info.
DECODER = "image_decoder"


def image_settings(architecture: Architecture, data: DataConfig) -> ImageSettings | None:
    """How the images of conversations are read; None for models that do not read any, and for streams.

    Raises ValueError for options without a model that reads images, DataError if its processor is not supported.
    """
    images, folder = architecture.config.images, architecture.tokenizer_folder
    if images is None:
        for name, value, default in changed_options(data, DATA_OPTIONS):
            shown = yaml_text(default)
            raise ValueError(f"data.{name}: {yaml_text(value)}, but the model reads no images; leave it at {shown}")
        return None
    if folder is None or data.streaming:
        return None
    encoder = architecture.encoder
    if encoder is None and not has_image_processor(folder):
        logger.warning("images: %s has no image processor, so conversations with images are refused", folder)
        return None
    has_axes = any(each.rope is not None and each.rope.axes for each in architecture.config.attentions)
    values, path = read_processor(folder) if encoder is None else (encoder.processor, Path(OPTION))
    settings = settings_of(
        values, path, placeholder=images.placeholder, patch_size=images.patch_size, has_axes=has_axes
    )
    sides = settings.fixed_size
    if images.is_fixed and (sides is None or {side // images.patch_size for side in sides} != {images.side}):
        made = "images of different sizes" if sides is None else f"images of {sides[1]} x {sides[0]} pixels"
        raise DataError(
            f"{path}: the image processor makes {made}, but the model reads {images.side} x {images.side} patches of "
            f"{images.patch_size} x {images.patch_size} pixels"
        )
    if settings.merge_size != images.merge_size:
        raise DataError(
            f"{folder}: the image processor has merge_size: {settings.merge_size}, but that of the model is "
            f"{images.merge_size}"
        )
    root = None if data.image_root is None else Path(data.image_root).expanduser()
    if root is not None and not root.is_dir():
        raise ValueError(f"data.image_root: {root} is not a folder")
    limited = settings.limited(data.image_min_pixels, data.image_max_pixels, root)
    trained, own = ((each.min_pixels, each.max_pixels) for each in (limited, settings))
    if trained != own:
        logger.warning(
            "images: the model is trained on images of %s to %s pixels, but its image processor, which is exported "
            "unchanged, makes them %s to %s: set the processor's limits wherever the model is used",
            *trained,
            *own,
        )
    return limited


def check_image_model(config: DecoderConfig, train: TrainConfig, lora: LoraConfig) -> None:
    """Raise ValueError for options that do not fit the model's image encoder, or a model without one."""
    if config.images is None:
        for name, value, default in changed_options(train, TRAIN_OPTIONS):
            shown = yaml_text(default)
            raise ValueError(
                f"train.{name}: {yaml_text(value)}, but the model has no image encoder; leave it at {shown}"
            )
        return
    if lora.enable_lora:
        for name, value, default in changed_options(train, ENCODER_AND_DECODER):
            raise ValueError(
                f"train.{name}: {yaml_text(value)}, but adapters leave all parts as they are; leave it at "
                f"{yaml_text(default)}, or name modules in lora.modules_to_save"
            )
    elif train.freeze_encoders and train.freeze_projectors and train.freeze_decoder:
        raise ValueError("train.freeze_decoder: true, like freeze_encoders and freeze_projectors: nothing is trained")


def freeze_parts_(module: Decoder, train: TrainConfig, lora: LoraConfig, *, has_images: bool) -> None:
    """Freeze the parts of a model that reads images, as the options say; without images, all of the encoder.

    Adapters freeze all parts themselves.
    """
    if module.encoder is None or lora.enable_lora:
        return
    for part in module.encoder.tower if train.freeze_encoders or not has_images else ():
        part.requires_grad_(False)
    for part in module.encoder.projectors if train.freeze_projectors or not has_images else ():
        part.requires_grad_(False)
    if train.freeze_decoder:
        module.model.requires_grad_(False)
        if module.lm_head is not None:
            module.lm_head.requires_grad_(False)


def check_projectors_frozen(module: Decoder, train: TrainConfig) -> None:
    """Raise ValueError if adapters, or what is saved beside them, train projectors that an option freezes."""
    if module.encoder is None or not train.freeze_projectors:
        return
    if any(parameter.requires_grad for part in module.encoder.projectors for parameter in part.parameters()):
        raise ValueError(
            "train.freeze_projectors: true, but lora.modules_to_save or lora.lora_target_modules name a projector; "
            "leave it out there, or set freeze_projectors to false"
        )


def recorded_decoder(settings: ImageSettings | None) -> dict[str, str]:
    """The entry in a checkpoint's info that identifies how this installation decodes images; empty without images."""
    return {} if settings is None else {DECODER: decoder_digest()}


def require_same_decoder(folder: Path, saved: Mapping[str, JSON], now: Mapping[str, JSON]) -> None:
    """Raise ValueError if the run of a checkpoint decoded images to other values than this one, by their infos."""
    before, here = saved.get(DECODER), now.get(DECODER)
    if before is not None and here is not None and before != here:
        raise ValueError(
            f"train.load_checkpoint_path: {folder} is of a run in which images were decoded to other values (Pillow or "
            "torch is another build there); install the same versions, or start a new run from its weights"
        )


def image_flops_of(module: Decoder) -> Callable[[Sequence[tuple[int, int]]], float]:
    """Returns a function from grids of images to the floating-point operations of a step on them: see `image_flops`."""
    encoder = module.encoder
    if encoder is None:
        return lambda _: 0.0
    trains_tower, trains_projectors = (
        any(parameter.requires_grad for part in parts for parameter in part.parameters())
        for parts in (encoder.tower, encoder.projectors)
    )
    return partial(image_flops, encoder.config, trains_tower=trains_tower, trains_projectors=trains_projectors)


def image_cost(config: DecoderConfig, train: TrainConfig, lora: LoraConfig) -> tuple[float, float]:
    """The cost of encoding an image, in tokens of the decoder: for each patch, and for each pair of patches."""
    images = config.images
    if images is None:
        return 0.0, 0.0
    trains_tower = not train.freeze_encoders and not lora.enable_lora
    side = images.merge_size
    one, two = (
        image_flops(images, [(side, width)], trains_tower=trains_tower, trains_projectors=not lora.enable_lora)
        for width in (side, 2 * side)
    )
    patches, token = side**2, training_flops(config, [1])
    pair = (two - 2 * one) / (2 * patches**2)
    return (one / patches - pair * patches) / token, pair / token


def largest_grids(documents: PreparedDocuments, bins: Bins, num_bins: int) -> list[tuple[int, int]]:
    """The (height, width) in patches of the images of a micro-batch of `num_bins` bins, those with the most patches."""
    patches = documents.image_patches()
    if patches is None:
        return []
    of_bins = np.add.reduceat(patches[bins.indices, 0], bins.offsets[:-1])
    largest = np.argsort(-of_bins, kind="stable")[:num_bins]
    numbers = [int(index) for each in largest for index in bins.documents(each)]
    return [(image.grid.height, image.grid.width) for index in numbers for image in documents.images(index)]


def largest_input(
    module: Decoder, layout: SequenceLayout, grids: Sequence[tuple[int, int]]
) -> dict[str, ImageInput | Tensor]:
    """What a model receives besides the tokens of a row with black images of these grids, as far as they have room."""
    config = module.config.images
    if config is None or not grids:
        return {}
    num_patches, device = sum(height * width for height, width in grids), layout.positions.device
    places = torch.arange(min(num_patches // config.merge_size**2, len(layout.positions) // module.ranks.size))
    places = places.to(device)
    patches = torch.zeros(num_patches, NUM_COLORS * config.patch_size**2, dtype=torch.uint8, device=device)
    images = ImageInput(patches, grids, places, places, (0.5,) * NUM_COLORS, (0.5,) * NUM_COLORS)
    return {"images": images, COORDINATES: layout.positions[:, None].expand(-1, 3)}


def lr_scales(module: Decoder, train: TrainConfig) -> Mapping[str, float]:
    """By name of each parameter of the encoder with a learning rate of its own: its ratio to `train.lr`."""
    if module.encoder is None:
        return {}
    projectors = {id(each) for part in module.encoder.projectors for each in part.parameters()}
    scales: dict[str, float] = {}
    for name, parameter in module.encoder.named_parameters(prefix="encoder"):
        rate = train.projector_lr if id(parameter) in projectors else train.encoder_lr
        if rate is not None:
            scales[name] = rate / train.lr if train.lr else 0.0
    return scales
