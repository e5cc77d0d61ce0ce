"""Training on images over ranks: the loss and gradients of one process, whichever rank has images, and resumes.

test_layouts.py has the other layouts, where all passes have images.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from image_runs import image_run, refusal_of, write_image_folder, write_image_rows
from placement import whole
from ranks import Launch, Launches
from xorl.ckpt import read_manifest
from xorl.config import config_from_mapping
from xorl.core.loss import cross_entropy
from xorl.core.models import Decoder
from xorl.train import build_run, train
from xorl.train.adapters.inject import flops_of
from xorl.train.images import DECODER, require_same_decoder

Options = Mapping[str, object]
TRAINED = {"freeze_encoders": False}
# Some bins of the first step have no images. Which ones are in it depends on the path of the data.
NUM_BINS = 16
# By name: the number of ranks, and the options.
LAYOUTS: Mapping[str, tuple[int, Options]] = {
    "one process": (1, {}),
    "fsdp2": (2, {}),
    "ddp": (2, {"data_parallel_mode": "ddp"}),
}
CASES: Mapping[str, Options] = {"frozen": {}, "trained": TRAINED}


def first_step(folder: Path, output: Path, options: Options) -> tuple[float, dict[str, Tensor]]:
    """The loss of the first step, summed over all ranks, and the whole gradient by parameter."""
    run = build_run(config_from_mapping(image_run(folder, output, **options)).config)
    _, batches = next(run.loader.steps())
    assert sum(batch.images is not None for batch in batches) == len(batches)
    if len(batches) == NUM_BINS:
        assert not all((batch.images.features >= 0).any() for batch in batches if batch.images is not None)
    losses = run.engine.forward_backward(batches, cross_entropy)
    gradients = {}
    for name, parameter in run.engine.model.module.named_parameters():
        gradient = parameter.grad
        assert (gradient is not None) == parameter.requires_grad, name
        if gradient is not None:
            gradients[name] = whole(gradient)
    return float(losses.loss_sum), gradients


def decayed_by_steps_of_text(folder: Path, output: Path, options: Options) -> list[dict[str, Tensor]]:
    """The encoder's parameters before training, and after a step of one and of four micro-batches without images."""
    settings = {**options, **TRAINED, "weight_decay": 0.1, "micro_batch_size": 1}
    run = build_run(config_from_mapping(image_run(folder, output, **settings)).config)
    assert isinstance(run.engine.model.module, Decoder)
    encoder = run.engine.model.module.encoder
    assert encoder is not None
    text = next(each for _, batches in run.loader.steps() for each in batches if not each.images.num_images)
    found, shards = [], [parameter.detach() for parameter in encoder.parameters()]
    start = [shard.clone() for shard in shards]
    for batches in ([], [text], [text] * 4):
        for shard, value in zip(shards, start, strict=True):
            shard.copy_(value)
        if batches:
            losses = run.engine.forward_backward(batches, cross_entropy)
            run.engine.optim_step(0.01, losses.divisor)
            if run.engine.model.mesh.data.size == 1:
                of_text = flops_of(run.engine.model.module.config, run.engine.model.module)(text.document_lengths)
                assert float(losses.flops) == len(batches) * of_text
        found.append({name: whole(each) for name, each in encoder.named_parameters()})
    return found


@pytest.fixture(scope="module")
def found(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    folder = tmp_path_factory.mktemp("images")
    write_image_folder(folder / "model")
    write_image_rows(folder / "data", 12)
    with (folder / "data" / "rows.jsonl").open("a") as file:
        # Rows whose bins have no image.
        for index in range(12):
            question = {"role": "user", "content": "what is " + "abc"[index % 3] * (30 + index)}
            file.write(json.dumps({"messages": [question, {"role": "assistant", "content": "none."}]}) + "\n")
    cells = {}
    for layout, (num_ranks, options) in LAYOUTS.items():
        for case, own in CASES.items():
            values = {**options, **own, "gradient_accumulation_steps": NUM_BINS // num_ranks}
            cells[layout, case] = (num_ranks, partial(first_step, folder, folder / f"{layout} {case}", values))
        output = folder / f"{layout} of text"
        cells[layout, "text"] = (num_ranks, partial(decayed_by_steps_of_text, folder, output, options))
    return launch(cells)


@pytest.mark.parametrize("layout", ["fsdp2", "ddp"])
@pytest.mark.parametrize("case", CASES)
def test_layouts_compute_what_one_process_computes(found: Launches, layout: str, case: str) -> None:
    # Catches ranks without an image that wait for ever.
    [(loss, gradients), *_] = found(layout, case)
    [(wanted_loss, wanted)] = found("one process", case)
    assert any(name.startswith("encoder.blocks") for name in wanted) == (case == "trained")
    assert any(name.startswith("encoder.projector") for name in wanted)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert (gradient - wanted[name]).norm() < 1e-4 * wanted[name].norm(), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_without_images_decay_the_encoder_however_they_are_split(found: Launches, layout: str) -> None:
    # Catches parameters without a gradient in a step of text, which an optimizer leaves out: how much an encoder decays
    # would depend on how steps are split.
    for start, one, four in found(layout, "text"):
        assert start.keys() == one.keys() == four.keys()
        decayed = {name for name, value in start.items() if not torch.equal(one[name], value)}
        assert any(name.startswith("blocks") for name in decayed)
        for name, value in start.items():
            wanted = value * (1 - 0.01 * 0.1) if name in decayed else value
            assert torch.equal(one[name], four[name]), name
            torch.testing.assert_close(one[name], wanted)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def run_to_the_end(folder: Path, output: Path, **options: object) -> dict[str, Tensor]:
    """The exported tensors of a run, whose optimizer has each trained parameter once."""
    run = build_run(config_from_mapping(image_run(folder, output, **options)).config)
    updated = [id(parameter) for group in run.engine.optimizer.param_groups for parameter in group["params"]]
    trained = [id(parameter) for parameter in run.engine.model.module.parameters() if parameter.requires_grad]
    assert sorted(updated) == sorted(trained)
    train(run)
    steps = options["max_steps"]
    export = output / "checkpoints" / f"global_step_{steps}-export"
    return tensors_in(export) if export.is_dir() else {}


# By case: the options, and the parts that are trained.
PARTS: Mapping[str, tuple[Options, set[str]]] = {
    "default": ({}, {"projectors", "decoder"}),
    "all": (TRAINED, {"tower", "projectors", "decoder"}),
    "projectors": ({"freeze_decoder": True}, {"projectors"}),
    "decoder": ({"freeze_projectors": True}, {"decoder"}),
    "rates of 0": ({**TRAINED, "encoder_lr": 0.0, "projector_lr": 0.0}, {"decoder"}),
}
PREFIXES = {"tower": "model.visual.blocks", "projectors": "model.visual.merger", "decoder": "model.language_model.la"}


@pytest.mark.parametrize("case", PARTS)
def test_parts_are_trained_as_asked(tmp_path: Path, run_ranks, case: str) -> None:
    # Catches a frozen part that moves, a part that is to be trained and stays, and a rate that reaches another part.
    write_image_folder(tmp_path / "model")
    write_image_rows(tmp_path / "data", 12)
    options, wanted = PARTS[case]
    [after] = run_ranks(lambda: run_to_the_end(tmp_path, tmp_path / "output", max_steps=2, **options), 1)
    before = tensors_in(tmp_path / "model")
    assert after.keys() == before.keys()
    for part, prefix in PREFIXES.items():
        names = [name for name in before if name.startswith(prefix) and name.endswith("weight")]
        assert {not torch.equal(before[name], after[name]) for name in names} == {part in wanted}, part


def embed_every_other_image(rows: Path) -> None:
    """Replaces files by their bytes in every other row with images."""
    written, num_images = [], [0, 0]
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        parts = [part for part in row["messages"][0]["content"] if isinstance(part, dict) and "path" in part]
        is_embedded = len(written) % 2
        for part in parts if is_embedded else ():
            part["base64"] = base64.b64encode((rows.parent / part.pop("path")).read_bytes()).decode()
        num_images[is_embedded] += len(parts)
        written.append(json.dumps(row) + "\n")
    assert all(num_images)
    rows.write_text("".join(written))


def test_a_resumed_run_ends_as_one_that_was_not_stopped(tmp_path: Path, run_ranks) -> None:
    # Catches images that are drawn again, left out, or decoded otherwise after a resume, whether they are in files or
    # in rows, a run that is not repeatable, and a resume that trains other parts.
    write_image_folder(tmp_path / "model")
    embed_every_other_image(write_image_rows(tmp_path / "data", 24))
    options = {**TRAINED, "save_steps": 2, "load_checkpoint_path": "auto"}

    def run(name: str, max_steps: int) -> dict[str, Tensor]:
        return run_ranks(lambda: run_to_the_end(tmp_path, tmp_path / name, max_steps=max_steps, **options), 2)[0]

    whole, again = run("whole", 6), run("again", 6)
    run("stopped", 2)
    resumed = run("stopped", 6)
    assert whole
    [checkpoint] = (tmp_path / "stopped" / "checkpoints").glob("global_step_6")
    info = read_manifest(checkpoint).info
    require_same_decoder(checkpoint, info, info)
    with pytest.raises(ValueError, match="images were decoded to other values"):
        require_same_decoder(checkpoint, info, {DECODER: "of another build"})
    other = {**options, "freeze_encoders": True, "load_checkpoint_path": str(checkpoint)}
    [message] = run_ranks(lambda: refusal_of(image_run(tmp_path, tmp_path / "other", max_steps=8, **other)), 1)
    assert "train.freeze_encoders: false, now true" in message
    for name, tensor in whole.items():
        assert torch.equal(tensor, again[name]), name
        assert torch.equal(tensor, resumed[name]), name
