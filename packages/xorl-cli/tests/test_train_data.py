"""What a run trains on: its parts, the order of its bins, and the receipt of both."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from full_disk import full_disk
from local_options import local_config
from xorl.ckpt import CheckpointError
from xorl.ckpt.layout import Manifest
from xorl.core.mesh import Mesh
from xorl.train.data import DataIdentity, RunData, plan_steps, prepare_data, write_receipt
from xorl.train.startup import plan_of, saved_data_of


def data_in(folder: Path, rows: Iterable[object], name: str = "rows.jsonl") -> dict[str, object]:
    """The options of rows in a file of a folder, prepared by one process beside it."""
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = {"dataset_prepared_path": str(folder / "prepared"), "dataset_num_proc": 1}
    return {"datasets": [{"path": str(folder / name)}], **prepared}


@pytest.mark.parametrize("val_set_size", [1, 99])
def test_split_that_leaves_nothing_to_train_or_to_evaluate_is_refused(val_set_size: int, tmp_path: Path) -> None:
    # Catches a mean over no tokens, hours into the run.
    rows = [{"input_ids": [1, 2], "labels": [-100, 2 if index else -100]} for index in range(100)]
    options = {**data_in(tmp_path, rows), "val_set_size": val_set_size}
    refused = 0
    for seed in range(300):  # which document is drawn is chance
        try:
            prepare_data(local_config(data=options, seed=seed), vocab_size=3)
        except ValueError as error:
            refused += "has a trained token" in str(error)
    assert 0 < refused < 30


def test_shards_of_the_training_data_leave_test_datasets_whole(tmp_path: Path) -> None:
    """Catches runs on other shards that are evaluated on other documents, a part of those that they name."""
    rows = [{"input_ids": [1, 2, index % 3]} for index in range(40)]
    test = data_in(tmp_path, rows[:12], "test.jsonl")["datasets"]
    options = {**data_in(tmp_path, rows), "test_datasets": test, "dataset_shard_num": 4, "dataset_shard_idx": 1}
    data = prepare_data(local_config(data=options), vocab_size=3)
    assert (len(data.train.documents), len(data.held_out.documents)) == (10, 12)
    # One prepared dataset in the place of both is still refused, though a shard of it is another part.
    options |= {"skip_prepare_dataset": True, "test_datasets": options["datasets"]}
    with pytest.raises(ValueError, match=r"would be both data\.datasets and data\.test_datasets"):
        prepare_data(local_config(data=options), vocab_size=3)


@pytest.mark.parametrize(
    ("accumulation", "drop_last", "max_steps", "left_out", "warned"),
    [
        (100, True, None, 49, True),
        (100, False, None, 0, False),
        (10, True, None, 9, True),
        (4, True, None, 1, False),
        (100, True, 1, 49, False),
    ],
)
def test_bins_that_fill_no_step_are_said(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    accumulation: int,
    drop_last: bool,
    max_steps: int | None,
    left_out: int,
    warned: bool,
) -> None:
    """Catches a third of the data left out of every epoch without a line, of a receipt that says dropped=0."""
    rows = [{"input_ids": [1, 2, 1]}] * 149
    options = {**data_in(tmp_path, rows), "sample_packing_sequence_len": 4, "dataloader_drop_last": drop_last}
    config = local_config(
        data=options, gradient_accumulation_steps=accumulation, max_steps=max_steps, micro_batch_size=1
    )
    data = prepare_data(config, vocab_size=3)
    plan = plan_steps(config, data.train, 1, None)
    said = [record.message for record in caplog.records if "data.dataloader_drop_last" in record.message]
    assert len(said) == warned
    assert all(f"leaves {left_out} of the 149 bins out" in message for message in said)
    write_receipt(tmp_path / "receipt.json", data, plan)
    steps = json.loads((tmp_path / "receipt.json").read_text())["train"]["steps"]
    num = 149 // accumulation if drop_last else -(-149 // accumulation)
    assert steps == {"bins_per_step": accumulation, "steps_per_epoch": num, "left_out_bins": left_out}


@pytest.mark.parametrize("shuffled", [False, True])
def test_data_that_are_not_shuffled_are_trained_on_in_their_order(shuffled: bool, tmp_path: Path) -> None:
    """Catches a curriculum that the order of bins turns upside down, with every option of shuffling off."""
    rows = [{"input_ids": [1, n, 1]} for n in range(60)]
    shuffling = {"shuffle_merged_datasets": shuffled, "shuffle_before_merging_datasets": False}
    packing = {"sample_packing_sequence_len": 6, "sample_packing_sequentially": True}
    options = {**data_in(tmp_path, rows), **packing, **shuffling}
    steps = {"gradient_accumulation_steps": 3, "num_train_epochs": 2}
    config = local_config(data=options, **steps)
    train = prepare_data(config, vocab_size=60).train
    plan = plan_steps(config, train, 1, None)
    bins = [int(index) for step in range(plan.num_steps) for index in plan.bins_of_step(step)]
    spans = [train.bins.indices[slice(*train.bins.offsets[index : index + 2])] for index in bins]
    numbers = [int(train.documents.document(int(index))[0][1]) for span in spans for index in span]
    assert (numbers == 2 * list(range(60))) is not shuffled
    assert sorted(numbers) == sorted(2 * list(range(60)))
    # What is not drawn does not change with the seed, so that a run may go on with another one.
    other = plan_steps(local_config(data=options, **steps, seed=7), train, 1, None)
    assert (other.hash == plan.hash) is not shuffled
    # Before, bins were shuffled all the same: a checkpoint of then goes on in its order.
    former = replace(plan, shuffle=True)
    mesh = cast(Mesh, SimpleNamespace(data=SimpleNamespace(size=1)))
    assert plan_of(config, RunData(train, None), mesh, DataIdentity.of(former)) == former


def test_a_receipt_that_cannot_be_written_is_told_with_its_file(tmp_path: Path) -> None:
    # Catches forty lines of traceback around a full disk that do not say which disk.
    config = local_config(data=data_in(tmp_path, [{"input_ids": [1, 2, 1]}]))
    data = prepare_data(config, vocab_size=3)
    plan = plan_steps(config, data.train, 1, None)
    with full_disk(30), pytest.raises(ValueError, match=r"train\.output_dir: .*receipt\.json cannot be written"):
        write_receipt(tmp_path / "receipt.json", data, plan)
    assert not list(tmp_path.glob("receipt*"))


def test_a_resume_says_which_accumulation_it_takes_in_place_of_the_options(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Catches an option changed for a resume that is passed over in a line which nobody reads.
    options = {**data_in(tmp_path, [{"input_ids": [1, 2]}] * 16), "sample_packing_sequence_len": 2}
    config = local_config(data=options, micro_batch_size=1, gradient_accumulation_steps=8, max_steps=2)
    data = prepare_data(config, vocab_size=3)
    assert plan_steps(config, data.train, 2, 4).bins_per_step == 4
    (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "train.gradient_accumulation_steps is 2 instead of 8" in said.getMessage()


def test_checkpoints_without_a_position_in_data_say_how_to_start_from_them() -> None:
    """Catches a checkpoint of a service that is refused with advice about sweeps."""
    position = {"order": "a", "num_bins": 3, "bins_per_step": 1, "position": 2}
    for info, members, says in (
        ({"service": {}}, ("",), r"saved it\. To start a new run from its weights, set lora\.adapter_path"),
        ({"data": position}, ("one",), r"is of no sweep, and lora\.sweep has one: restore"),
        ({"sweep": {"one": position, "two": position}}, ("",), r"a sweep of one, two, and lora\.sweep has no members"),
    ):
        manifest = Manifest(4, "dcp", 1, [], info, {}, {})
        with pytest.raises(CheckpointError, match=says):
            saved_data_of(manifest, members)
