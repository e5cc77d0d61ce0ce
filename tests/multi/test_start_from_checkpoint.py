"""`train.load_weights_mode: dcp`: a run begins with the weights of a checkpoint, and what is none is refused."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tiny_models import hf_config, write_config
from tiny_runs import BARE, metrics_of, run_values, write_counting_rows
from xorl.ckpt import CheckpointError, read_manifest
from xorl.ckpt.layout import latest_checkpoint
from xorl.config import config_from_mapping
from xorl.config.local import ModelConfig
from xorl.train.export.saved import export_saved
from xorl.train.model_source import read_architecture
from xorl.train.run import run_training

NUM_STEPS = 3


def run(folder: Path, name: str, model: dict[str, object], **train: object) -> Callable[[], int]:
    """What each rank does; the run's folder is `name` in `folder`."""
    options = {**BARE, "max_steps": NUM_STEPS, **train}
    loaded = config_from_mapping(run_values(folder, folder / name, model=model, **options))
    return lambda: run_training(loaded)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a model's config.json and, in `run`, the checkpoint of a process that trained it."""
    folder = tmp_path_factory.mktemp("saved")
    write_counting_rows(folder / "train.jsonl", 48)
    model = {"config_path": str(write_config(folder / "model", hf_config()))}
    assert run(folder, "run", model, data_parallel_mode="none")() == 0
    return folder


@pytest.mark.parametrize(
    ("manager", "ranks", "modes"), [("dcp", (2, 1), ("fsdp2", "none")), ("torch", (1, 2), ("none", "fsdp2"))]
)
def test_a_run_starts_from_a_checkpoint_as_from_its_export(
    manager: str, ranks: tuple[int, int], modes: tuple[str, str], tmp_path: Path, run_ranks
) -> None:
    # Catches weights in the wrong place, a step or moments that come along, and a layout that has to stay as it was.
    write_counting_rows(tmp_path / "train.jsonl", 48)
    model = {"config_path": str(write_config(tmp_path / "model", hf_config()))}
    before = run(tmp_path, "before", model, data_parallel_mode=modes[0], ckpt_manager=manager)
    assert run_ranks(before, ranks[0]) == [0] * ranks[0]
    exported = export_saved(str(tmp_path / "before"), str(tmp_path / "exported"))
    shutil.rmtree(tmp_path / "model")

    starts: dict[str, dict[str, object]] = {
        "dcp": {"model_path": str(tmp_path / "before"), "merge_qkv": False},
        "broadcast": {"model_path": str(exported), "merge_qkv": False},
    }
    for mode, start in starts.items():
        after = run(tmp_path, mode, start, data_parallel_mode=modes[1], load_weights_mode=mode)
        assert run_ranks(after, ranks[1]) == [0] * ranks[1]
    got, wanted, trained = (metrics_of(tmp_path / name)[0] for name in ("dcp", "broadcast", "before"))
    assert [got[key] for key in ("step", "loss", "grad_norm")] == [wanted[key] for key in ("step", "loss", "grad_norm")]
    assert got["loss"] < trained["loss"]
    newest = latest_checkpoint(tmp_path / "before" / "checkpoints")
    noted = read_manifest(tmp_path / "dcp" / "checkpoints" / f"global_step_{NUM_STEPS}").info["model"]
    assert isinstance(noted, dict)
    assert noted["path"] == str(newest)


def test_what_no_run_can_start_from_is_refused(saved: Path, tmp_path: Path) -> None:
    # Catches a folder that is taken for what it is not, found out after the data were prepared, and a message that does
    # not say what to do.
    checkpoint = saved / "run" / "checkpoints" / f"global_step_{NUM_STEPS}"
    adapter = tmp_path / "adapter"
    shutil.copytree(checkpoint, adapter)
    (adapter / "adapter_config.json").write_text("{}")
    other = write_config(tmp_path / "other", hf_config(hidden_size=48, rms_norm_eps=1e-3))
    changed = tmp_path / "changed"
    shutil.copytree(checkpoint, changed)
    (changed / "metadata.json").write_text((changed / "metadata.json").read_text().replace('"step": 3', '"step": 4'))
    (tmp_path / "empty").mkdir()
    for model, message in (
        (ModelConfig(model_path=str(tmp_path / "gone")), "it is not a local folder"),
        (ModelConfig(model_path=str(tmp_path / "empty")), "it has no metadata.json, and no checkpoint below"),
        (ModelConfig(model_path=str(other)), "a Hugging Face folder, which other values of load_weights_mode read"),
        (ModelConfig(model_path=str(adapter)), r"holds an adapter.*xorl export --merge"),
        (ModelConfig(model_path=str(changed)), "its text was changed after it was written"),
        (
            ModelConfig(model_path=str(saved / "run"), config_path=str(other)),
            r"(?s)global_step_3 is of another model than model.config_path .* describes.*hidden_size: 32, not 48",
        ),
    ):
        with pytest.raises(ValueError, match=f"(?s)^model.model_path: .*{message.removeprefix('(?s)')}"):
            read_architecture(model, "dcp")
    with pytest.raises(ValueError, match=r"an xorl checkpoint: set train.load_weights_mode: dcp to start from it"):
        read_architecture(ModelConfig(model_path=str(checkpoint)))
    assert read_architecture(ModelConfig(model_path=str(saved / "run")), "dcp").config.hidden_size == 32


def test_a_damaged_checkpoint_is_refused_on_every_rank(saved: Path, tmp_path: Path, run_ranks) -> None:
    # Catches values that are loaded though their file has changed, and ranks that wait for the one that noticed.
    shutil.copytree(saved / "run", tmp_path / "run")
    shard = next((tmp_path / "run" / "checkpoints" / f"global_step_{NUM_STEPS}").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    start = run(saved, "damaged", {"model_path": str(tmp_path / "run")}, load_weights_mode="dcp")

    def refused() -> str:
        with pytest.raises(CheckpointError) as error:
            start()
        return str(error.value)

    for message in run_ranks(refused, 2):
        assert message.startswith("model.model_path: ")
        assert f"{shard.name} has changed" in message
