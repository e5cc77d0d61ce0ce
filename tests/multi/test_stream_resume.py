"""A run that streams and is resumed, on any number of ranks and workers, trains as the one that was not stopped."""

import json
import os
from pathlib import Path

import pytest

from tiny_models import hf_config, write_config
from tiny_runs import metrics_of, write_rows, write_run
from xorl.ckpt import CheckpointError, read_manifest
from xorl.config import load_config
from xorl.data import DataError
from xorl.data.stream import files, lane, order
from xorl.train.run import run_training

BINS_PER_STEP = 12


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, and data of about 90 bins in many small blocks."""
    monkeypatch.setattr(files, "BLOCK_BYTES", 800)
    monkeypatch.setattr(order, "_RUNS_PER_LANE", 1)
    for module in (order, lane):
        monkeypatch.setattr(module, "RUN_BINS", 6)
    write_rows(tmp_path / "train.jsonl", 250)
    write_config(tmp_path / "model", hf_config(tie_word_embeddings=True, initializer_range=0.02))
    return tmp_path


def run(folder: Path, output: Path, steps: int, workers: int = 0) -> int:
    options = {
        "data": {"streaming": True, "dataloader_num_workers": workers, "pad_to_multiple_of": 16},
        "data_parallel_mode": "ddp",
        "gradient_accumulation_steps": BINS_PER_STEP // int(os.environ["WORLD_SIZE"]),
        "max_steps": steps,
        "load_checkpoint_path": "auto",
        "save_async": True,
    }
    path = output.parent / f"{output.name}_{os.environ['RANK']}.yaml"
    return run_training(load_config(write_run(path, folder, output, **options)))


def refusal(folder: Path, output: Path, steps: int) -> str:
    with pytest.raises((CheckpointError, DataError)) as error:
        run(folder, output, steps)
    return str(error.value)


def records(output: Path) -> list[tuple[float, ...]]:
    """(step, tokens, trained tokens, loss) of every step."""
    names = ("step", "num_tokens", "num_trained_tokens", "loss")
    return [tuple(record[name] for name in names) for record in metrics_of(output)]


def test_resumed_streams_train_on_the_same_documents(folder: Path, run_ranks, capfd) -> None:
    # Catches documents that are repeated or lost where a run goes on, within an epoch (7 steps) and beyond its end, and
    # checkpoints that are announced for each epoch of a stream, which has none.
    whole = folder / "whole"
    run_ranks(lambda: run(folder, whole, 10), 1)
    [saves] = [line for line in capfd.readouterr().err.splitlines() if "Output: " in line]
    assert "epochs" not in saves
    parts = folder / "parts"
    for steps, world, workers in ((2, 2, 0), (3, 1, 2), (8, 4, 0), (10, 2, 1)):
        run_ranks(lambda steps=steps, workers=workers: run(folder, parts, steps, workers), world)
    expected, found = records(whole), records(parts)
    assert [row[:3] for row in found] == [row[:3] for row in expected]
    assert [row[3] for row in found] == pytest.approx([row[3] for row in expected], rel=1e-4)
    place = read_manifest(parts / "checkpoints" / "global_step_10").info["data"]
    assert place["position"] == 10 * BINS_PER_STEP
    assert sum(first for first, _ in place["stream_positions"][:-1]) > 0
    receipts = [json.loads((output / "data_receipt.json").read_text())["train"] for output in (whole, parts)]
    assert receipts[0] == receipts[1]
    assert receipts[0]["plan_hash"] == place["order"]
    assert receipts[0]["num_bins"] == 10 * BINS_PER_STEP
    assert receipts[0]["total"]["kept"] >= 250
    assert receipts[0]["fill"] == pytest.approx(sum(row[1] for row in found) / (10 * BINS_PER_STEP * 64))


def test_a_stream_over_other_files_is_not_continued(folder: Path, run_ranks) -> None:
    # Catches a place in the data that is applied to data which it does not belong to.
    output = folder / "output"
    run_ranks(lambda: run(folder, output, 1), 1)
    with (folder / "train.jsonl").open("a") as file:
        file.write('{"input_ids": [1, 2, 3]}\n')
    [told] = run_ranks(lambda: refusal(folder, output, 2), 1)
    assert "the data is not what this checkpoint was trained on" in told


def test_a_stream_that_fails_before_its_first_checkpoint_leaves_a_receipt(folder: Path, run_ranks) -> None:
    # Catches a run of which nothing tells what it was to train on.
    output = folder / "output"
    with (folder / "train.jsonl").open("a") as file:
        file.write('{"input_ids": ["word"]}\n')
    assert "train.jsonl, line 251" in run_ranks(lambda: refusal(folder, output, 10), 1)[0]
    receipt = json.loads((output / "data_receipt.json").read_text())["train"]
    assert receipt["plan_hash"]
    assert (receipt["num_bins"], receipt["total"]["samples"]) == (0, 0)
