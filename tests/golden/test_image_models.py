"""Models that read images against transformers: logits and gradients of packed rows, files, and what must not leak."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor

from hf_cases import gradients_of, to_hf
from image_models import (
    DOCUMENTS,
    IMAGE,
    VISION,
    ImageDocument,
    image_config,
    image_document,
    logits_of,
    make_image_decoder,
    make_image_model,
    packed,
)
from xorl.core.models import SPECS, Decoder, spec_for
from xorl.core.nn import LayerKernels
from xorl.kernels.attention import AttentionRequest, resolve_attention

LOGIT_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4


def kernels_of(backend: str) -> LayerKernels:
    requests = [AttentionRequest("cpu", torch.float32, 16, None, causal=causal) for causal in (True, False)]
    return LayerKernels(
        attention=resolve_attention(backend, requests[0]), image_attention=resolve_attention(backend, requests[1])
    )


@pytest.mark.parametrize(("backend", "tied"), [("sdpa", False), ("eager", True)])
def test_packed_documents_are_those_of_transformers_alone(backend: str, tied: bool) -> None:
    # Catches any difference in the mathematics, features at other tokens, coordinates that go on over documents, and
    # attention of images or documents to each other.
    model = make_image_model(tied=tied)
    decoder, recipes = make_image_decoder(model, kernels=kernels_of(backend))
    wanted = torch.cat([logits_of(model, document) for document in DOCUMENTS])
    ids, layout, options = packed(DOCUMENTS)
    found = decoder(ids, layout, **options)
    assert (found - wanted).abs().max() < LOGIT_TOLERANCE
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    (wanted * weight).sum().backward()
    (found * weight).sum().backward()
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    ours = to_hf(recipes, gradients_of(decoder))
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() < GRADIENT_TOLERANCE * gradient.norm(), name


ALONE = (
    *DOCUMENTS,
    image_document(7, (2, 4), 1, (4, 2), 3, (6, 4)),  # three, the first and the last at its ends
    image_document(8, 1, (2, 2)),
)


@pytest.mark.parametrize("document", ALONE)
def test_coordinates_are_those_of_transformers(document: ImageDocument) -> None:
    # Catches coordinates that differ for the first or the last token, for one of several images, or without any.
    model = make_image_model().model
    grids = torch.tensor([[1, *grid] for grid in document.grids]) if document.grids else None
    kinds = (document.ids[None] == IMAGE).int()
    found, _ = model.get_rope_index(document.ids[None], mm_token_type_ids=kinds, image_grid_thw=grids)
    assert torch.equal(found[:, 0].T, document.coordinates)


def row_of(decoder: Decoder, documents: list[ImageDocument]) -> list[Tensor]:
    ids, layout, options = packed(documents)
    with torch.no_grad():
        return list(decoder(ids, layout, **options).split([len(document.ids) for document in documents]))


def test_an_image_changes_its_own_document_alone() -> None:
    # Catches features that go to the tokens of another document, and any leak between images.
    decoder, _ = make_image_decoder(make_image_model())
    documents = list(DOCUMENTS)
    before = row_of(decoder, documents)
    changed = replace(documents[0], patches=[255 - documents[0].patches[0], documents[0].patches[1]])
    after = row_of(decoder, [changed, *documents[1:]])
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[0][:3], after[0][:3])  # what stands before the image
    for one, other in zip(before[1:], after[1:], strict=True):
        assert torch.equal(one, other)
    twin = image_document(9, 2, (4, 4), 3, (4, 4), 5)
    exchanged = replace(twin, patches=[*reversed(twin.patches)])
    assert (row_of(decoder, [twin])[0] - row_of(decoder, [exchanged])[0]).abs().max() > 1e-3


def test_an_image_changes_no_gradient_of_another_document() -> None:
    # Catches what leaks in the backward pass alone.
    decoder, _ = make_image_decoder(make_image_model())
    changed = replace(DOCUMENTS[0], patches=[255 - each for each in DOCUMENTS[0].patches])
    first = len(DOCUMENTS[0].ids)
    gradients = []
    for documents in (DOCUMENTS, (changed, *DOCUMENTS[1:])):
        ids, layout, options = packed(documents)
        decoder.zero_grad(set_to_none=True)
        decoder(ids, layout, **options)[first:].square().sum().backward()
        gradients.append({name: each.grad.clone() for name, each in decoder.named_parameters()})
    assert all(gradient.any() for gradient in gradients[0].values())
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_coordinates_change_no_other_document() -> None:
    # Catches borders of documents, or a mask, that are taken from coordinates.
    decoder, _ = make_image_decoder(make_image_model())
    ids, layout, options = packed(DOCUMENTS)
    lengths = [len(document.ids) for document in DOCUMENTS]
    coordinates = options["coordinates"].clone()
    coordinates[: lengths[0]] = torch.randint(50, (lengths[0], 3), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        before = decoder(ids, layout, **options).split(lengths)
        after = decoder(ids, layout, **options | {"coordinates": coordinates}).split(lengths)
    assert not torch.equal(before[0], after[0])
    assert all(torch.equal(one, other) for one, other in zip(before[1:], after[1:], strict=True))


def test_what_stands_for_images_is_not_read_and_gets_no_gradient() -> None:
    # Catches features that are added to the embedding of the placeholder, and a row that is trained by its inputs.
    decoder, _ = make_image_decoder(make_image_model())
    ids, layout, options = packed(DOCUMENTS)
    found = decoder(ids, layout, **options)
    found.sum().backward()
    gradient = decoder.model.embed_tokens.weight.grad
    assert not gradient[IMAGE].any()
    assert gradient[ids[ids != IMAGE]].any()
    other = torch.where(ids == IMAGE, 91, ids)
    assert torch.equal(decoder(other, layout, **options), found)


def test_every_tap_counts_and_lands_at_the_tokens_of_images() -> None:
    # Catches taps that are lost, exchanged, or added to text.
    decoder, _ = make_image_decoder(make_image_model())
    ids, layout, options = packed(DOCUMENTS)
    assert decoder.encoder is not None
    before = decoder(ids, layout, **options).detach()
    for tap in decoder.encoder.taps:
        kept = [parameter.detach().clone() for parameter in tap.parameters()]
        with torch.no_grad():
            for parameter in tap.parameters():
                parameter.zero_()
        after = decoder(ids, layout, **options).detach()
        assert (after - before)[ids == IMAGE].abs().max() > 1e-3
        with torch.no_grad():
            for parameter, value in zip(tap.parameters(), kept, strict=True):
                parameter.copy_(value)
    text = DOCUMENTS[2]
    start = sum(len(document.ids) for document in DOCUMENTS[:2])
    alone = row_of(decoder, [text])[0]
    torch.testing.assert_close(before[start : start + len(text.ids)], alone, atol=1e-6, rtol=0)


def test_a_row_of_text_is_that_of_the_text_family() -> None:
    # Catches a rotation by axes that differs for text, and an encoder that changes it.
    decoder, _ = make_image_decoder(make_image_model())
    text = SPECS["Qwen3ForCausalLM"]
    values = {**image_config().to_dict()["text_config"], "architectures": ["Qwen3ForCausalLM"]}
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e3}
    twin = text.build(text.config_from_hf(values))
    state = {name: value for name, value in decoder.state_dict().items() if not name.startswith("encoder.")}
    twin.load_state_dict(state)
    ids, layout, options = packed([DOCUMENTS[2], image_document(5, 12)])
    wanted = twin(ids, layout)
    assert torch.equal(decoder(ids, layout), wanted)
    assert torch.equal(decoder(ids, layout, coordinates=options["coordinates"]), wanted)


def test_an_image_that_no_token_stands_for_changes_nothing() -> None:
    # Catches the image of rows without one: it must add exact zeros to every gradient, and with a frozen encoder even
    # if its features are not finite.
    decoder, _ = make_image_decoder(make_image_model())
    ids, layout, options = packed([DOCUMENTS[2]])
    _, _, others = packed([image_document(6, 1, (2, 2))])
    nowhere = torch.empty(0, dtype=torch.int64)
    padding = replace(others["images"], places=nowhere, features=nowhere)
    plain = decoder(ids, layout, coordinates=options["coordinates"])
    found = decoder(ids, layout, coordinates=options["coordinates"], images=padding)
    assert torch.equal(found, plain)
    found.sum().backward()
    assert decoder.encoder is not None
    for name, parameter in decoder.encoder.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
    wanted = {name: each.grad.clone() for name, each in decoder.model.named_parameters()}
    decoder.zero_grad(set_to_none=True)
    decoder.encoder.requires_grad_(False)
    with torch.no_grad():
        decoder.encoder.projector.down.weight.fill_(torch.nan)
    found = decoder(ids, layout, coordinates=options["coordinates"], images=padding)
    assert torch.equal(found, plain)
    found.sum().backward()
    assert all(torch.equal(each.grad, wanted[name]) for name, each in decoder.model.named_parameters())


def test_a_frozen_tower_keeps_nothing_and_its_projectors_are_trained() -> None:
    # Catches activations that a frozen tower saves for the backward pass, and projectors that stay as they are.
    decoder, _ = make_image_decoder(make_image_model())
    assert decoder.encoder is not None
    ids, layout, options = packed(DOCUMENTS)
    decoder(ids, layout, **options).sum().backward()
    wanted = {name: each.grad.clone() for name, each in decoder.encoder.projector.named_parameters()}
    decoder.zero_grad(set_to_none=True)
    for module in decoder.encoder.tower:
        module.requires_grad_(False)
    outputs: list[bool] = []
    hook = decoder.encoder.blocks[-1].register_forward_hook(lambda *given: outputs.append(given[-1].requires_grad))
    decoder(ids, layout, **options).sum().backward()
    hook.remove()
    assert outputs == [False]
    for name, parameter in decoder.encoder.projector.named_parameters():
        assert torch.equal(parameter.grad, wanted[name]), name
    assert all(each.grad is None for module in decoder.encoder.tower for each in module.parameters())


def test_pixels_are_normalised_in_fp32() -> None:
    # Catches pixels that are rounded to bf16 before their mean is subtracted.
    decoder, _ = make_image_decoder(make_image_model())
    _, _, options = packed(DOCUMENTS)
    assert decoder.encoder is not None
    seen: list[Tensor] = []
    patches = decoder.encoder.patches
    patches.base = lambda x: seen.append(x) or torch.zeros(len(x), VISION["hidden_size"], dtype=x.dtype)
    for dtype in (torch.float32, torch.bfloat16):
        patches(options["images"], dtype)
    wide, narrow = seen
    assert torch.equal(wide.bfloat16(), narrow)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["vision_config"].update(num_position_embeddings=37), "37 is not a square"),
        (lambda c: c["vision_config"].update(out_hidden_size=64), "out_hidden_size: 64 is not supported"),
        (lambda c: c["vision_config"].update(deepstack_visual_indexes=[7]), "taps: .* are not different blocks"),
        (lambda c: c["vision_config"].update(new_key=1), "new_key: 1, which may change what it computes"),
        (lambda c: c["text_config"]["rope_parameters"].update(mrope_section=[1, 2, 3]), "with the sum 8"),
        (lambda c: c["text_config"]["rope_parameters"].update(mrope_interleaved=False), "mrope_interleaved"),
        (lambda c: c["text_config"]["rope_parameters"].update(rope_type="dynamic", factor=2.0), "as dynamic does"),
        (lambda c: c.update(new_key=1), "new_key: 1, which may change what it computes"),
    ],
)
def test_other_models_are_refused(change: Callable[[dict[str, dict[str, object]]], None], message: str) -> None:
    # Catches a key of config.json that changes the model and is not read.
    values = image_config().to_dict()
    spec_for(values).config_from_hf(values)
    change(values)
    with pytest.raises(ValueError, match=message):
        spec_for(values).config_from_hf(values)


def test_images_that_do_not_fit_are_refused() -> None:
    # Catches patches of other images, and a model without an encoder that ignores them.
    decoder, _ = make_image_decoder(make_image_model())
    ids, layout, options = packed(DOCUMENTS)
    images = options["images"]
    with pytest.raises(ValueError, match=r"the patches are \[69, 48\], but the grids .* have 68 patches of 48 values"):
        decoder(ids, layout, **options | {"images": replace(images, patches=images.patches.new_zeros(69, 48))})
    text = SPECS["Qwen3ForCausalLM"]
    values = {**image_config().to_dict()["text_config"], "rope_parameters": {"rope_type": "default"}}
    with pytest.raises(ValueError, match="the model has no image encoder"):
        text.build(text.config_from_hf(values))(ids, layout, **options)


def test_known_keys_are_all_that_transformers_saves() -> None:
    # Catches a config.json of transformers' default model that is refused.
    config = transformers.Qwen3VLConfig(architectures=["Qwen3VLForConditionalGeneration"])
    values = config.to_dict()
    values["vision_config"]["out_hidden_size"] = values["text_config"]["hidden_size"]
    read = spec_for(values).config_from_hf(values)
    assert read.images is not None
    assert (read.images.taps, read.images.head_dim) == ((8, 16, 24), 72)
