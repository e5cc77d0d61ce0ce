"""Runs on images, from a folder to exports and adapters that transformers and PEFT open, and the data they show."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedModel

from image_models import DOCUMENTS, MEAN, logits_of, make_image_decoder, make_image_model, packed
from image_runs import export_of, image_run, opened, refusal_of, write_image_folder, write_image_rows
from xorl.config import config_from_mapping
from xorl.core.loss import cross_entropy
from xorl.lora import AdapterSpec, adapters, inject
from xorl.train import build_run
from xorl.train.bench.image_peers import ImagePeer
from xorl.train.bench.peers import Peer
from xorl.train.data import PackedDocuments, prepare_data
from xorl.train.images import image_flops_of, image_settings, largest_grids, lr_scales
from xorl.train.model_source import read_architecture

NUM_STEPS = 2


def run(folder: Path, output: Path, *, lora: Mapping[str, object] | None = None, **options: object) -> Path:
    """The export of a run on images."""
    return export_of({**image_run(folder, output, max_steps=NUM_STEPS, **options), "lora": dict(lora or {})})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_image_folder(tmp_path / "model")
    write_image_rows(tmp_path / "data", 12)
    return tmp_path


@torch.no_grad()
def all_logits(model: PreTrainedModel) -> Tensor:
    return torch.cat([logits_of(model, document) for document in DOCUMENTS])


@pytest.mark.multi
def test_an_export_opens_in_transformers_with_its_processor(folder: Path, run_ranks) -> None:
    # Catches an export without its tower or processor, names that transformers does not find, and a convolution that
    # is written as a matrix.
    options = {"freeze_encoders": False, "enable_gradient_checkpointing": True, "recompute_policy": "auto"}
    [export] = run_ranks(lambda: run(folder, folder / "output", **options), 1)
    model, start = opened(export), opened(folder / "model")
    assert tuple(AutoImageProcessor.from_pretrained(export).image_mean) == MEAN
    found, before = (load_file(each / "model.safetensors") for each in (export, folder / "model"))
    assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in before.items()}
    assert (all_logits(model) - all_logits(start)).abs().max() > 1e-3
    decoder, _ = make_image_decoder(model)
    ids, layout, options = packed(DOCUMENTS)
    assert (decoder(ids, layout, **options) - all_logits(model)).abs().max() < 1e-5
    values = image_run(folder, folder / "again", max_steps=1) | {"model": {"model_path": str(export)}}
    assert run_ranks(lambda: build_run(config_from_mapping(values).config).start_step, 1) == [0]


@pytest.mark.parametrize("targets", ["all-linear", None], ids=["all-linear", "default"])
def test_adapters_are_on_the_decoder_alone(targets: str | None) -> None:
    # Catches adapters on the tower, whose layers have the endings of the decoder's: other programs ignore them there.
    decoder, _ = make_image_decoder(make_image_model())
    named = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    inject(decoder, AdapterSpec(rank=2, alpha=2.0, targets=targets or named))
    names = list(adapters(decoder))
    assert len(names) == 7 * decoder.config.num_layers
    assert all(name.startswith("model.language_model.layers.") for name in names)


def test_layers_of_the_encoder_must_be_named(tmp_path: Path) -> None:
    # Catches a layer of the encoder that cannot have an adapter although it is asked for, or an adapter that no other
    # program can read.
    decoder, _ = make_image_decoder(make_image_model())
    inject(decoder, AdapterSpec(rank=2, alpha=2.0, targets=("attn.qkv", "merger.linear_fc2")))
    assert {name.rpartition("visual.")[2] for name in adapters(decoder)} == {
        *(f"blocks.{index}.attn.qkv" for index in range(3)),
        "merger.linear_fc2",
    }
    decoder, _ = make_image_decoder(make_image_model())
    with pytest.raises(ValueError, match=r"patch_embed\.proj \(it is a convolution in checkpoints"):
        inject(decoder, AdapterSpec(rank=2, alpha=2.0, targets=("patch_embed.proj",)))


@pytest.mark.multi
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_changes_the_logits_of_transformers_as_its_merged_model(folder: Path, run_ranks) -> None:
    # Catches an adapter whose names PEFT does not find, so that it computes the base, and a base that moved with it.
    lora = {"enable_lora": True, "lora_rank": 4, "lora_alpha": 8}
    [export] = run_ranks(lambda: run(folder, folder / "output", lora=lora, lr=0.05), 1)
    base, merged = opened(folder / "model"), opened(export)
    before, wanted = all_logits(base), all_logits(merged)
    assert (wanted - before).abs().max() > 1e-2
    adapter = export.with_name(export.name.removesuffix("-export"))
    theirs = PeftModel.from_pretrained(base, adapter).eval().base_model.model
    assert (all_logits(theirs) - wanted).abs().max() < 1e-4
    found, start = (load_file(each / "model.safetensors") for each in (export, folder / "model"))
    assert all(torch.equal(tensor, start[name]) for name, tensor in found.items() if ".visual." in name)


@pytest.mark.multi
def test_without_images_the_encoder_is_not_used(folder: Path, run_ranks, caplog: pytest.LogCaptureFixture) -> None:
    # Catches an encoder that weight decay pulls to zero, and options that then have no effect.
    write_image_rows(folder / "data", 12, with_images=False)
    [export] = run_ranks(lambda: run(folder, folder / "output", weight_decay=0.1), 1)
    found, start = (load_file(each / "model.safetensors") for each in (export, folder / "model"))
    moved = {name for name, tensor in found.items() if not torch.equal(tensor, start[name])}
    assert moved
    assert not any(".visual." in name for name in moved)
    values = image_run(folder, folder / "other", max_steps=1, freeze_encoders=False)
    [told] = run_ranks(lambda: refusal_of(values), 1)
    assert "train.freeze_encoders: false, but no conversation has an image" in told


def test_a_run_that_trains_nothing_is_refused(folder: Path, run_ranks) -> None:
    # Catches options that would be ignored, or fail later.
    values = image_run(folder, folder / "output", max_steps=1, freeze_projectors=True, freeze_decoder=True)
    [told] = run_ranks(lambda: refusal_of(values), 1)
    assert re.search(r"train\.freeze_decoder: true, like .* nothing is trained", told)


def test_limits_that_the_exported_processor_lacks_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Catches a model that is used with larger images than it was trained on, without a word.
    config = config_from_mapping(image_run(folder, folder / "output")).config
    architecture = read_architecture(config.model)
    assert image_settings(architecture, config.data) is not None
    assert not caplog.records
    limited = image_settings(architecture, config.data.model_copy(update={"image_max_pixels": 256}))
    assert limited is not None
    assert limited.max_pixels == 256
    assert "images of 64 to 256 pixels, but its image processor" in caplog.text


def test_rates_are_those_of_their_parts(folder: Path) -> None:
    # Catches a rate that reaches another part, or none.
    decoder, _ = make_image_decoder(make_image_model())
    values = image_run(folder, folder / "output", lr=0.01, freeze_encoders=False, encoder_lr=0.001, projector_lr=0.1)
    config = config_from_mapping(values).config
    scales = lr_scales(decoder, config.train)
    mappers = ("encoder.projector.", "encoder.taps.")
    encoder = [name for name, _ in decoder.named_parameters() if name.startswith("encoder.")]
    assert scales == {name: pytest.approx(10.0 if name.startswith(mappers) else 0.1) for name in encoder}
    assert lr_scales(decoder, config.train.model_copy(update={"encoder_lr": None, "projector_lr": None})) == {}


def test_flops_of_an_encoder_by_hand() -> None:
    # Catches an encoder that is left out of the rate of a run, or counted backward though it is frozen.
    decoder, _ = make_image_decoder(make_image_model())
    assert decoder.encoder is not None
    patches, tokens, width = 4 * 6, 6, 32
    block = width * 3 * width + width * width + 2 * width * 40
    tower = patches * (96 * width + 3 * block) + 3 * 2 * width * patches**2
    mergers = 3 * tokens * (128 * 128 + 128 * 48)
    assert image_flops_of(decoder)([(4, 6)]) == 2 * 3 * (tower + mergers)
    for part in decoder.encoder.tower:
        part.requires_grad_(False)
    assert image_flops_of(decoder)([(4, 6)]) == 2 * (tower + 2 * mergers)


def test_the_most_images_of_a_micro_batch_are_found(folder: Path) -> None:
    # Catches a prediction of memory for the images of one document, or of another bin.
    config = config_from_mapping(image_run(folder, folder / "output")).config
    architecture = read_architecture(config.model)
    images = image_settings(architecture, config.data)
    data = prepare_data(config, architecture.config.vocab_size, architecture.tokenizer_folder, images=images).train
    assert isinstance(data, PackedDocuments)
    areas = [
        sum(image.grid.area for index in data.bins.documents(number) for image in data.documents.images(int(index)))
        for number in range(len(data.bins))
    ]
    assert len(set(areas)) > 2
    for num_bins in (1, 2):
        grids = largest_grids(data.documents, data.bins, num_bins)
        assert sum(height * width for height, width in grids) == sum(sorted(areas)[-num_bins:])


def test_rows_are_json_with_images(folder: Path) -> None:
    # Catches rows of this file without images, with which the other tests would show nothing.
    rows = [json.loads(line) for line in (folder / "data" / "rows.jsonl").read_text().splitlines()]
    assert sum("image" in json.dumps(row) for row in rows) == 8


@pytest.mark.multi
@pytest.mark.parametrize("own_attention", [False, True])
def test_a_peer_of_a_benchmark_trains_the_same_model(folder: Path, run_ranks, own_attention: bool) -> None:
    # Catches a peer that attends over documents, reads other patches or positions, or trains other parts: faster, and
    # not the same work.
    options = {"freeze_encoders": False, "data_parallel_mode": "none"}

    def losses() -> tuple[float, float, set[str], float, float]:
        config = config_from_mapping(image_run(folder, folder / "output", **options)).config
        ours = build_run(config)
        # A whole epoch, since its first steps may be of text: the order of rows depends on the path of the data.
        steps = (batches for _, batches in ours.loader.steps())
        batches = next(each for each in steps if any(batch.images.num_images for batch in each))
        wanted = ours.engine.forward_backward(batches, cross_entropy)
        architecture = read_architecture(config.model)
        with Peer.parse("transformers").engine_maker() as make:
            peer = make(config, architecture, ours.engine.model.mesh, torch.device("cpu"))
        model = peer.model.module
        model.load_state_dict(opened(folder / "model").state_dict())
        if own_attention:
            # As with the kernels of a GPU: one call for all images.
            ImagePeer(architecture.config.images, config.train, torch.device("cpu")).prepare_(model, has_attention=True)
        found = peer.forward_backward(batches, cross_entropy)
        gradient = model.model.visual.patch_embed.proj.weight.grad * sum(batch.num_trained_tokens for batch in batches)
        mine = ours.engine.model.module.encoder.patches.weight.grad
        return (
            float(found.loss_sum),
            float(wanted.loss_sum),
            {name for name, each in model.named_parameters() if each.grad is None},
            float(gradient.norm()),
            float(mine.norm()),
        )

    [(found, wanted, untrained, gradient, own)] = run_ranks(losses, 1)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert untrained == set()
    assert gradient == pytest.approx(own, rel=1e-4)
