"""Runs on a language model composed with an image encoder (`model.encoders`): folders in, one folder out."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoProcessor

from image_models import COMPOSED_DOCUMENTS, IMAGE, composed_logits, make_composed_model, make_image_decoder, packed
from image_runs import (
    export_of,
    image_run,
    opened,
    refusal_of,
    write_composed_folders,
    write_image_rows,
    write_tokenizer,
)
from xorl.train.export.saved import export_saved

NUM_STEPS = 2


def values_of(folder: Path, output: Path, model: Mapping[str, object] | None = None, **options: object) -> dict:
    """The options of a run of the two folders, or of those that `model` names."""
    values = image_run(folder, output, max_steps=NUM_STEPS, **options)
    composed = {"model_path": str(folder / "model"), "encoders": {"image": {"model_path": str(folder / "encoder")}}}
    return values | {"model": dict(model or composed)}


@pytest.fixture(params=["clip", "siglip"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_composed_folders(tmp_path, request.param)
    write_image_rows(tmp_path / "data", 12)
    return tmp_path


@pytest.mark.multi
def test_two_folders_become_one_that_transformers_opens(folder: Path, run_ranks) -> None:
    # Catches a tower or decoder that is drawn instead of loaded, layers of the tower that are lost, an export without
    # its processor, and a checkpoint that does not know what it was composed of.
    [export] = run_ranks(lambda: export_of(values_of(folder, folder / "output")), 1)
    model = opened(export)
    found, text, tower = (
        load_file(each / "model.safetensors") for each in (export, folder / "model", folder / "encoder")
    )
    for name, tensor in tower.items():
        inner = name.removeprefix("vision_model.")
        if f"model.vision_tower.{inner}" in found:
            assert torch.equal(found[f"model.vision_tower.{inner}"], tensor), name
        else:
            assert name.startswith(("text_", "visual_projection", "logit_")), name
    changes = [
        (found[name.replace("model.", "model.language_model.", 1)] - tensor).abs().max()
        for name, tensor in text.items()
    ]
    assert 0 < max(changes) < 0.1
    processor = AutoProcessor.from_pretrained(export)
    given = processor(text="<image>ab", images=[torch.zeros(3, 20, 30, dtype=torch.uint8)])
    assert sum(each == IMAGE for each in given["input_ids"][0]) == 9
    theirs = AutoImageProcessor.from_pretrained(folder / "encoder").to_dict()
    assert AutoImageProcessor.from_pretrained(export).to_dict() == theirs
    decoder, _ = make_image_decoder(model)
    ids, layout, options = packed(COMPOSED_DOCUMENTS)
    wanted = torch.cat([composed_logits(model, document) for document in COMPOSED_DOCUMENTS])
    assert (decoder(ids, layout, **options | {"coordinates": None}) - wanted).abs().max() < 1e-5
    checkpoint = export.with_name(f"global_step_{NUM_STEPS}")
    again = export_saved(str(checkpoint), str(folder / "again"), verify=True)
    assert {file.name for file in again.iterdir()} == {"README.md", *(file.name for file in export.iterdir())}
    for file in export.iterdir():
        if file.suffix == ".json":
            assert (again / file.name).read_bytes() == file.read_bytes(), file.name
    exported = load_file(again / "model.safetensors")
    assert exported.keys() == found.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in found.items())


@pytest.mark.multi
def test_a_resumed_run_ends_as_one_that_was_not_stopped(folder: Path, run_ranks) -> None:
    # Catches a projector that is drawn again on a resume, and a tower that is then read from its folder again.
    options = {"freeze_encoders": False, "save_steps": 1, "load_checkpoint_path": "auto"}

    def end(name: str, steps: int) -> Path:
        values = values_of(folder, folder / name, **options)
        values["train"]["max_steps"] = steps
        return export_of(values)

    [whole] = run_ranks(lambda: end("whole", 4), 1)
    run_ranks(lambda: end("stopped", 2), 1)
    [resumed] = run_ranks(lambda: end("stopped", 4), 1)
    wanted, found = (load_file(each / "model.safetensors") for each in (whole, resumed))
    start = load_file(folder / "encoder" / "model.safetensors")
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())
    blocks = [name for name in start if ".layers.0." in name and "text_model" not in name]
    assert blocks
    assert not any(
        torch.equal(start[name], found[f"model.vision_tower.{name.removeprefix('vision_model.')}"]) for name in blocks
    )


@pytest.mark.multi
@pytest.mark.filterwarnings("ignore")
def test_adapters_train_over_the_exported_folder(folder: Path, run_ranks) -> None:
    # Catches an export that cannot be trained on, and an adapter whose names PEFT does not find in transformers' model.
    values = values_of(folder, folder / "output", freeze_decoder=True, projector_lr=0.1)
    [base] = run_ranks(lambda: export_of(values), 1)
    lora = {"enable_lora": True, "lora_rank": 4, "lora_alpha": 8}
    values = values_of(folder, folder / "adapter", {"model_path": str(base)}, lr=0.05) | {"lora": lora}
    [merged] = run_ranks(lambda: export_of(values), 1)
    wanted = opened(merged)
    adapter = merged.with_name(f"global_step_{NUM_STEPS}")
    theirs = PeftModel.from_pretrained(opened(base), adapter).eval().base_model.model
    for document in COMPOSED_DOCUMENTS:
        with torch.no_grad():
            before, found, merge = (composed_logits(each, document) for each in (opened(base), theirs, wanted))
        assert (merge - before).abs().max() > 1e-2
        assert (found - merge).abs().max() < 1e-4
    found, start = (load_file(each / "model.safetensors") for each in (base, folder / "model"))
    assert all(
        torch.equal(found[name.replace("model.", "model.language_model.", 1)], tensor) for name, tensor in start.items()
    )


Change = Mapping[str, Mapping[str, object]]
REFUSED: Mapping[str, tuple[Change, str]] = {
    "no token": ({}, r"model\.encoders\.image: the tokenizer in .* has no token <image>, .*tokenizer\.add_tokens"),
    "beyond the vocabulary": (
        {"model": {"foundation": {"image_token_index": 300}}},
        r"model\.encoders\.image: the tokenizer in .* has no token with the id 300",
    ),
    "no encoder": (
        {"model": {"encoders": {"image": {"model_path": "{folder}/model"}}}},
        r"model\.encoders\.image\.model_path: .*model_type: 'qwen3' is not an image encoder that is supported",
    ),
    "no sizes": (
        {"model": {"encoders": {"image": {"model_path": "{folder}/no_sizes"}}}},
        r"model\.encoders\.image\.model_path: .*patch_size: None, want the pixels on a side",
    ),
    "no weights": (
        {"model": {"encoders": {"image": {"model_path": "{folder}/no_weights"}}}},
        r"model\.encoders\.image\.model_path: .*contains no model\.safetensors",
    ),
    "other sizes": (
        {"model": {"encoders": {"image": {"model_path": "{folder}/other_sizes"}}}},
        r"the image processor makes images of 12 x 12 pixels, but the model reads 4 x 4 patches of 4 x 4 pixels",
    ),
    "two encoders": (
        {"model": {"model_path": "{folder}/composed"}},
        r"model\.encoders\.image: .*a LlavaForConditionalGeneration has its own image encoder; leave model\.encoders",
    ),
    "adapters": ({"lora": {"enable_lora": True}}, r"adapters need a base in one folder"),
    "video": ({"model": {"encoders": {"video": {"model_path": "a"}}}}, "encoders of video and audio are not supported"),
    "nothing": ({"model": {"encoders": {"image": {}}}}, "of image are both null: set model_path"),
    "checkpoint": (
        {"train": {"load_weights_mode": "dcp"}},
        "the checkpoint in model.model_path already has its encoder",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_composed_is_refused(tmp_path: Path, run_ranks, case: str) -> None:
    # Catches options that would be ignored, or fail with an error that says nothing of them.
    write_composed_folders(tmp_path, "siglip", image="<|image|>" if case == "no token" else "<image>")
    make_composed_model("siglip").save_pretrained(tmp_path / "composed")
    write_tokenizer(tmp_path / "composed")
    write_image_rows(tmp_path / "data", 3)
    for name, change in (("no_sizes", {"patch_size": None}), ("no_weights", {}), ("other_sizes", {"image_size": 18})):
        other = tmp_path / name
        shutil.copytree(tmp_path / "encoder", other)
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps({**config, **change}))
    (tmp_path / "no_weights" / "model.safetensors").unlink()
    changes, message = REFUSED[case]
    values = values_of(tmp_path, tmp_path / "output")
    named = json.loads(json.dumps(dict(changes)).replace("{folder}", str(tmp_path)))
    values = {section: {**values.get(section, {}), **named.get(section, {})} for section in {*values, *named}}
    [told] = run_ranks(lambda: refusal_of(values), 1)
    assert re.search(message, told)
