"""Tiny models that read images, of transformers and of xorl with the same weights, and rows for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import transformers
from torch import Tensor

from xorl.core.models import Decoder, spec_for
from xorl.core.models.image_config import ImageInput
from xorl.core.models.recipes import WeightRecipe
from xorl.core.nn import LayerKernels
from xorl.data.images.coordinates import document_coordinates
from xorl.data.images.size import Size
from xorl.kernels.layout import SequenceLayout
from xorl.lora.peft import InMemoryTensors

VOCAB = 97
IMAGE, START, END = 90, 92, 93
PATCH, MERGE = 4, 2
MEAN, STD = (0.5, 0.4, 0.3), (0.5, 0.25, 0.3)
TEXT: Mapping[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e3,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
VISION: Mapping[str, object] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "out_hidden_size": 48,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2],
}


def image_config(*, tied: bool = False) -> transformers.PreTrainedConfig:
    config = transformers.Qwen3VLConfig(
        text_config=dict(TEXT),
        vision_config=dict(VISION),
        image_token_id=IMAGE,
        video_token_id=91,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=tied,
        architectures=["Qwen3VLForConditionalGeneration"],
    )
    config._attn_implementation = "eager"
    return config


def make_image_model(*, tied: bool = False) -> transformers.PreTrainedModel:
    """A model in fp32; its norms and biases are neither 0 nor 1."""
    torch.manual_seed(0)
    model = transformers.Qwen3VLForConditionalGeneration(image_config(tied=tied))
    perturb_(model)
    return model


def perturb_(model: torch.nn.Module) -> None:
    """Add random numbers to all parameters."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def make_image_decoder(
    model: transformers.PreTrainedModel, *, merge_qkv: bool = True, kernels: LayerKernels | None = None
) -> tuple[Decoder, Mapping[str, WeightRecipe]]:
    """xorl's model with the weights of transformers'."""
    hf_config = model.config.to_dict()
    spec = spec_for(hf_config)
    config = spec.config_from_hf(hf_config)
    decoder = spec.build(config, merge_qkv=merge_qkv, kernels=kernels)
    recipes = spec.recipes(config, merge_qkv=merge_qkv)
    view = spec.checkpoint_view(config, InMemoryTensors(model.state_dict()))
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(recipes[name].read(view, 0, len(parameter)))
    return decoder, recipes


@dataclass(frozen=True)
class ImageDocument:
    """A document with images: token ids [T], and for each image its patches and its grid in patches."""

    ids: Tensor
    patches: Sequence[Tensor]
    grids: Sequence[tuple[int, int]]

    @property
    def spans(self) -> list[tuple[int, Size]]:
        """Of each image, the first token and the grid of tokens."""
        is_image = self.ids == IMAGE
        starts = torch.nonzero(is_image.int().diff(prepend=is_image.new_zeros(1).int()) > 0)[:, 0].tolist()
        return [
            (start, Size(height // MERGE, width // MERGE))
            for start, (height, width) in zip(starts, self.grids, strict=True)
        ]

    @property
    def coordinates(self) -> Tensor:
        return torch.from_numpy(document_coordinates(len(self.ids), self.spans))


def image_document(seed: int, *parts: int | tuple[int, int], merge: int = MERGE) -> ImageDocument:
    """A document of parts in order: a number of text tokens, or the (height, width) of an image in patches.

    merge: the patches on a side of what a token stands for.
    """
    generator = np.random.default_rng(seed)
    ids: list[int] = []
    patches, grids = [], []
    for part in parts:
        if isinstance(part, int):
            ids += generator.integers(0, IMAGE, part).tolist()
            continue
        height, width = part
        ids += [IMAGE] * (height * width // merge**2)
        pixels = generator.integers(0, 256, (height * width, 3 * PATCH**2), np.uint8)
        patches.append(torch.from_numpy(pixels))
        grids.append(part)
    return ImageDocument(torch.tensor(ids), patches, grids)


# The second begins with an image, the third has none, the last ends with one.
DOCUMENTS = (
    image_document(1, 3, (4, 6), 4, (2, 8), 5),
    image_document(2, (6, 2), 7),
    image_document(3, 9),
    image_document(4, 2, (4, 4)),
)


def logits_of(model: transformers.PreTrainedModel, document: ImageDocument) -> Tensor:
    """transformers' logits [T, V] of a document alone."""
    ids, mean, std = document.ids[None], *(torch.tensor(each)[:, None] for each in (MEAN, STD))
    if not document.grids:
        return model(input_ids=ids).logits[0]
    values = torch.cat(list(document.patches)).view(-1, 3, PATCH**2)
    values = (values.float() / 255 - mean) / std
    return model(
        input_ids=ids,
        pixel_values=values[:, :, None].expand(-1, -1, 2, -1).flatten(1),
        image_grid_thw=torch.tensor([[1, *grid] for grid in document.grids]),
        mm_token_type_ids=(ids == IMAGE).int(),
    ).logits[0]


def packed(documents: Sequence[ImageDocument]) -> tuple[Tensor, SequenceLayout, dict[str, object]]:
    """Documents in one row: its ids, its layout, and what the model receives besides."""
    ids = torch.cat([document.ids for document in documents])
    grids = [grid for document in documents for grid in document.grids]
    places = torch.nonzero(ids == IMAGE)[:, 0]
    patches = [each for document in documents for each in document.patches]
    images = ImageInput(torch.cat(patches), grids, places, torch.arange(len(places)), MEAN, STD) if grids else None
    coordinates = torch.cat([document.coordinates for document in documents])
    layout = SequenceLayout.from_lengths([len(document.ids) for document in documents])
    return ids, layout, {"coordinates": coordinates, "images": images}


# Tiny towers: what their decoder's features come from. Their last layer is not used.
TOWERS: Mapping[str, tuple[Mapping[str, object], str]] = {
    "clip": (
        {"model_type": "clip_vision_model", "layer_norm_eps": 1e-3, "projection_dim": 24, "hidden_act": "quick_gelu"},
        "default",
    ),
    "siglip": (
        {"model_type": "siglip_vision_model", "layer_norm_eps": 1e-3, "hidden_act": "gelu_pytorch_tanh"},
        "full",
    ),
}
TOWER_SIZES: Mapping[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": PATCH,
    "image_size": 3 * PATCH,
}
GRID = (3, 3)
TEXT_OF_COMPOSED: Mapping[str, object] = {
    **{key: value for key, value in TEXT.items() if key != "rope_parameters"},
    "model_type": "qwen3",
}


def composed_config(
    tower: str, text: Mapping[str, object], *, tied: bool = False, **changes: object
) -> transformers.PreTrainedConfig:
    values, strategy = TOWERS[tower]
    return transformers.LlavaConfig(
        text_config={**text, "tie_word_embeddings": tied},
        vision_config={**TOWER_SIZES, **values},
        image_token_index=IMAGE,
        image_seq_length=GRID[0] * GRID[1],
        vision_feature_select_strategy=strategy,
        tie_word_embeddings=tied,
        architectures=["LlavaForConditionalGeneration"],
        **changes,
    )


# By name, config.json of both kinds, for layouts; their widths suit ranks that share matrices and quantisation.
IMAGE_MODELS: Mapping[str, dict[str, object]] = {
    "images": {**image_config().to_dict(), "text_config": {**TEXT, "intermediate_size": 96}},
    "composed": composed_config("clip", {**TEXT_OF_COMPOSED, "intermediate_size": 96}).to_dict(),
}


# By name: a model, options of training, and of adapters. Images stand anywhere in rows, also across the parts of ranks
# that share one, and some rows have none.
RECOMPUTE = {"enable_gradient_checkpointing": True}
IMAGE_RUNS: Mapping[str, tuple[str, Mapping[str, object], Mapping[str, object]]] = {
    "images": ("images", {"freeze_encoders": False}, {}),
    "images, frozen": ("images", {**RECOMPUTE, "enable_reentrant": True}, {}),
    "images, QLoRA": (
        "images",
        {},
        {"enable_lora": True, "lora_rank": 4, "enable_qlora": True, "quant_format": "nf4", "quant_group_size": 16},
    ),
    "composed": ("composed", {**RECOMPUTE, "freeze_encoders": False, "recompute_policy": "operation"}, {}),
}
IMAGE_LAYOUTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("fsdp 2", "tp 2", "pp 2"), tuple(IMAGE_RUNS)),
    **dict.fromkeys(("ddp 2", "ulysses 2"), ("images", "images, frozen")),
    **dict.fromkeys(("hsdp 2", "ring 2, ulysses 2", "pp 2, hsdp 2", "pp 2, tp 2"), ("images",)),
    "ring 2": ("images", "composed"),
}


def make_composed_model(
    tower: str, text: Mapping[str, object] | None = None, *, tied: bool = False, **changes: object
) -> transformers.PreTrainedModel:
    """A model of a tower and a decoder in fp32; its norms and biases are neither 0 nor 1."""
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(
        composed_config(tower, text or TEXT_OF_COMPOSED, tied=tied, **changes)
    )
    perturb_(model)
    model.set_attn_implementation("eager")
    return model.eval()


COMPOSED_DOCUMENTS = (
    image_document(1, 3, GRID, 4, GRID, 5, merge=1),
    image_document(2, GRID, 7, merge=1),
    image_document(3, 9, merge=1),
    image_document(4, 2, GRID, merge=1),
)


def composed_logits(model: transformers.PreTrainedModel, document: ImageDocument) -> Tensor:
    """transformers' logits [T, V] of a document alone."""
    ids, mean, std = document.ids[None], *(torch.tensor(each)[:, None] for each in (MEAN, STD))
    if not document.grids:
        return model(input_ids=ids).logits[0]
    values = torch.stack(list(document.patches)).view(len(document.grids), -1, 3, PATCH**2)
    values = (values.float() / 255 - mean) / std
    rows, columns = GRID
    pixels = values.view(-1, rows, columns, 3, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
    pixels = pixels.reshape(-1, 3, rows * PATCH, columns * PATCH)
    return model(input_ids=ids, pixel_values=pixels).logits[0]
