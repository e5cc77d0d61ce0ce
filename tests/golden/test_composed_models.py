"""Decoders composed with the towers of image encoders, against transformers: logits, gradients, packing, files."""

from collections.abc import Mapping

import pytest
import torch
import transformers
from torch import Tensor

from image_models import (
    COMPOSED_DOCUMENTS,
    composed_logits,
    make_composed_model,
    make_image_decoder,
    packed,
)
from xorl.core.models import Decoder

LOGIT_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
ROUNDING = 1e-5
SIZES: Mapping[str, object] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 28}
# By label: a decoder inside, whose embedding, layers or names are of another kind.
TEXTS: Mapping[str, Mapping[str, object]] = {
    "llama": {"model_type": "llama"},
    "scaled embedding": {"model_type": "gemma2", "query_pre_attn_scalar": 12, "final_logit_softcapping": None},
    "experts": {"model_type": "qwen3_moe", **MIXTURE},
    "norms after": {"model_type": "olmo2"},
    "stacked": {"model_type": "phi3", "pad_token_id": 0},
    "mistral": {"model_type": "mistral", "sliding_window": 7},
}


def compare(model: transformers.PreTrainedModel, decoder: Decoder, recipes: Mapping[str, object]) -> None:
    """Raises unless logits and gradients of packed documents are those of transformers, one document at a time."""
    wanted = torch.cat([composed_logits(model, document) for document in COMPOSED_DOCUMENTS])
    ids, layout, options = packed(COMPOSED_DOCUMENTS)
    found = decoder(ids, layout, **options | {"coordinates": None})
    assert (found - wanted).abs().max() < LOGIT_TOLERANCE * max(1.0, float(wanted.detach().abs().max()))
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    (wanted * weight).sum().backward()
    (found * weight).sum().backward()
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    ours: dict[str, list[Tensor]] = {}
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, name
        for source, part in recipes[name].split(parameter.grad).items():
            ours.setdefault(source, []).append(part)
    unused = {name for name, gradient in theirs.items() if gradient is None or not gradient.any()}
    assert all(".vision_tower." in name for name in theirs.keys() - ours.keys() if ".experts." not in name)
    assert theirs.keys() - ours.keys() <= {*unused, *(name for name in theirs if ".experts." in name)}
    for name in ours.keys() & theirs.keys():
        gradient = theirs[name]
        assert gradient is not None
        # The gradient of biases of keys is zero but for rounding, as they add the same to all scores of a query.
        limit = ROUNDING if name.endswith("k_proj.bias") else GRADIENT_TOLERANCE * gradient.norm()
        assert (torch.cat(ours[name]) - gradient).norm() <= limit, name


@pytest.mark.parametrize("tower", ["clip", "siglip"])
@pytest.mark.parametrize("tied", [False, True])
def test_packed_documents_are_those_of_transformers_alone(tower: str, tied: bool) -> None:
    # Catches any difference in the mathematics of a tower, features of another layer or with the class token, and
    # attention of images or documents to each other.
    model = make_composed_model(tower, tied=tied)
    compare(model, *make_image_decoder(model))


@pytest.mark.parametrize("label", TEXTS)
def test_any_decoder_can_be_inside(label: str) -> None:
    # Catches features that are scaled like the embedding of text, and names of one family of decoders alone.
    model = make_composed_model("siglip", {**SIZES, **TEXTS[label]})
    compare(model, *make_image_decoder(model))
