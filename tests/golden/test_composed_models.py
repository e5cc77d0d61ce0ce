"""Decoders composed with the towers of image encoders, against transformers: logits, gradients, packing, files."""

from collections.abc import Callable, Mapping

import pytest
import torch
import transformers

from hf_cases import gradients_of, to_hf
from image_models import (
    COMPOSED_DOCUMENTS,
    GRID,
    PATCH,
    composed_config,
    composed_logits,
    make_composed_model,
    make_image_decoder,
    packed,
)
from xorl.core.models import Decoder, spec_for
from xorl.core.models.recipes import WeightRecipe
from xorl.lora.peft import InMemoryTensors
from xorl.train.images import image_flops_of

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


def compare(model: transformers.PreTrainedModel, decoder: Decoder, recipes: Mapping[str, WeightRecipe]) -> None:
    """Raises unless logits and gradients of packed documents are those of transformers, one document at a time."""
    wanted = torch.cat([composed_logits(model, document) for document in COMPOSED_DOCUMENTS])
    ids, layout, options = packed(COMPOSED_DOCUMENTS)
    found = decoder(ids, layout, **options | {"coordinates": None})
    assert (found - wanted).abs().max() < LOGIT_TOLERANCE * max(1.0, float(wanted.detach().abs().max()))
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    (wanted * weight).sum().backward()
    (found * weight).sum().backward()
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    ours = to_hf(recipes, gradients_of(decoder))
    unused = {name for name, gradient in theirs.items() if gradient is None or not gradient.any()}
    assert all(".vision_tower." in name for name in theirs.keys() - ours.keys() if ".experts." not in name)
    assert theirs.keys() - ours.keys() <= {*unused, *(name for name in theirs if ".experts." in name)}
    for name in ours.keys() & theirs.keys():
        gradient = theirs[name]
        # The gradient of biases of keys is zero but for rounding, as they add the same to all scores of a query.
        limit = ROUNDING if name.endswith("k_proj.bias") else GRADIENT_TOLERANCE * gradient.norm()
        assert (ours[name] - gradient).norm() <= limit, name


@pytest.mark.parametrize("tower", ["clip", "siglip"])
@pytest.mark.parametrize("tied", [False, True])
def test_packed_documents_are_those_of_transformers_alone(tower: str, tied: bool) -> None:
    # Catches any difference in the mathematics of a tower, features of another layer or with the class token, and
    # attention of images or documents to each other.
    model = make_composed_model(tower, tied=tied)
    compare(model, *make_image_decoder(model))


def test_flops_of_a_tower_by_hand() -> None:
    # Catches layers that are not used, a class token that is not counted, and the projector of another kind.
    decoder, _ = make_image_decoder(make_composed_model("clip"))
    assert decoder.encoder is not None
    patches, width, out = GRID[0] * GRID[1], 32, 48
    block = (patches + 1) * (4 * width * width + 2 * width * 40) + 2 * width * (patches + 1) ** 2
    tower = patches * 3 * PATCH**2 * width + 2 * block  # of 3 layers
    projector = patches * (width * out + out * out)
    assert image_flops_of(decoder)([GRID]) == 2 * 3 * (tower + projector)
    assert len(decoder.encoder.blocks) == 2


@pytest.mark.parametrize("label", TEXTS)
def test_any_decoder_can_be_inside(label: str) -> None:
    # Catches features that are scaled like the embedding of text, and names of one family of decoders alone.
    model = make_composed_model("siglip", {**SIZES, **TEXTS[label]})
    compare(model, *make_image_decoder(model))


Values = dict[str, dict[str, object]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(vision_feature_layer=[-2, -1]), "vision_feature_layer must be of type int"),
        (
            lambda c: c.update(vision_feature_layer=-4),
            "vision_feature_layer: -4, want the output of one of the 3 layers",
        ),
        (lambda c: c.update(vision_feature_select_strategy="full"), "vision_feature_select_strategy: 'full' is not"),
        (lambda c: c.update(new_key=1), "new_key: 1, which may change what it computes"),
        (lambda c: c["vision_config"].update(new_key=1), "new_key: 1, which may change what it computes"),
        (lambda c: c["vision_config"].update(model_type="dinov2"), "model_type: 'dinov2' is not supported"),
        (lambda c: c["text_config"].update(model_type="gpt2"), "learned positions|has no 'n_embd'"),
        (lambda c: c["text_config"].update(model_type="bert"), "model_type: 'bert'"),
    ],
)
def test_other_models_are_refused(change: Callable[[Values], None], message: str) -> None:
    # Catches a key of config.json that changes the model and is not read, and a decoder that others would not scale.
    values = composed_config("clip", {**SIZES, "model_type": "llama"}).to_dict()
    spec_for(values).config_from_hf(values)
    change(values)
    with pytest.raises(ValueError, match=message):
        spec_for(values).config_from_hf(values)


@pytest.mark.parametrize("scale", [{"embedding_multiplier": 2.0}, {"logits_scaling": 2.0}])
def test_decoders_that_scale_are_refused(scale: Mapping[str, object]) -> None:
    # Catches a composition that other programs compute otherwise.
    values = composed_config("siglip", {**SIZES, "model_type": "granite", **scale}).to_dict()
    with pytest.raises(ValueError, match="other programs would not scale or cap its embeddings or logits"):
        spec_for(values).config_from_hf(values)


@pytest.mark.parametrize("key", ["vision_feature_layer", "projector_hidden_act", "multimodal_projector_bias"])
def test_keys_of_the_projector_are_those_of_transformers(key: str) -> None:
    # Catches a key that is read and changes nothing.
    values = {"vision_feature_layer": -1, "projector_hidden_act": "relu", "multimodal_projector_bias": False}
    model = make_composed_model("clip", **{key: values[key]})
    compare(model, *make_image_decoder(model))


def test_files_of_the_hub_are_read() -> None:
    # Catches the names of earlier releases, and a config.json without the values that are the same in the first model.
    model = make_composed_model("clip")
    old = {"model.vision_tower.": "vision_tower.vision_model.", "model.language_model.": "language_model.model."}
    old |= {"model.multi_modal_projector.": "multi_modal_projector.", "lm_head.": "language_model.lm_head."}
    tensors = {}
    for name, tensor in model.state_dict().items():
        prefix = next(each for each in old if name.startswith(each))
        tensors[old[prefix] + name.removeprefix(prefix)] = tensor
    values = model.config.to_dict()
    spec = spec_for(values)
    config = spec.config_from_hf(values)
    view = spec.checkpoint_view(config, InMemoryTensors(tensors))
    sources = {source for recipe in spec.recipes(config, merge_qkv=True).values() for source in recipe.sources}
    assert sources == set(view.names())
    assert {view.in_source(name) for name in sources} | set(view.unused) == tensors.keys()
    assert all(name.startswith("vision_tower.vision_model.") for name in view.unused)
    first = {
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": 32000,
        "model_type": "llava",
        "projector_hidden_act": "gelu",
        "text_config": {
            "_name_or_path": "lmsys/vicuna-7b-v1.5",
            "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "rms_norm_eps": 1e-05,
            "torch_dtype": "float16",
            "vocab_size": 32064,
        },
        "torch_dtype": "float16",
        "vision_config": {
            "hidden_size": 1024,
            "image_size": 336,
            "intermediate_size": 4096,
            "model_type": "clip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "projection_dim": 768,
            "vocab_size": 32000,
        },
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "vocab_size": 32064,
    }
    read = spec_for(first).config_from_hf(first)
    assert (read.hidden_size, read.num_layers, read.vocab_size) == (4096, 32, 32064)
    assert read.images is not None
    assert (read.images.num_blocks, read.images.side, read.images.head_dim) == (23, 24, 64)
