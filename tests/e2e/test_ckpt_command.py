"""`xorl ckpt` shows, verifies and deletes the checkpoints of a run."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from xorl.ckpt import Checkpointer
from xorl.ckpt.publish import set_aside_after
from xorl.cli.app import app


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run that saved six times, went back once and has two checkpoints set aside."""
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    for step in (1, 2, 3, 4, 5, 6):
        checkpointer.save(step, {"model": torch.nn.Linear(1, 1)})
    set_aside_after(checkpointer.root, 4, checkpointer.root / "global_step_4")
    lines = [{"step": step, "loss": 1.0, "eval_loss": abs(step - 2) + 0.5} for step in (1, 2, 3, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def ckpt(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["ckpt", *map(str, arguments)])
    return result.exit_code, result.output


def test_ls_shows_all_with_their_loss(run_folder: Path) -> None:
    # Catches a checkpoint that takes space and is shown nowhere.
    (run_folder / "checkpoints" / "global_step_9").mkdir()
    code, output = ckpt("ls", run_folder)
    assert code == 0
    lines = {line.split()[0]: line for line in output.splitlines()[1:]}
    names = [f"global_step_{step}" for step in (1, 2, 3, 4)] + [f"set_aside_1/global_step_{step}" for step in (5, 6)]
    assert list(lines) == [*names, "global_step_9"]
    assert "0.5000" in lines["global_step_2"]
    assert lines["global_step_4"].endswith("latest")
    assert "not complete" in lines["global_step_9"]


def test_verify_names_the_damaged_file_and_what_is_intact(run_folder: Path) -> None:
    # Catches bit rot that is found only when the checkpoint is needed.
    assert ckpt("verify", run_folder)[0] == 0
    file = run_folder / "checkpoints" / "global_step_4" / "training_state" / "scalars.json"
    file.write_bytes(file.read_bytes() + b" ")
    code, output = ckpt("verify", run_folder)
    assert code == 2
    assert "training_state/scalars.json has 3 bytes, but 2 were saved" in output
    assert f"--train.load_checkpoint_path {run_folder}/checkpoints/global_step_3" in output
    assert ckpt("verify", run_folder / "checkpoints" / "global_step_2")[0] == 0
    code, output = ckpt("verify", run_folder / "nowhere")
    assert code == 2
    assert "PATH: " in output


def test_prune_deletes_only_when_told_to(run_folder: Path) -> None:
    # Catches a best or newest checkpoint that is deleted, a list that is not what is deleted, and a command that says
    # nothing if there is nothing to delete.
    before = sorted(run_folder.rglob("*"))
    options = [run_folder, "--keep-last", "1", "--keep-best", "1", "--set-aside"]
    code, listed = ckpt("prune", *options)
    assert code == 0
    assert sorted(run_folder.rglob("*")) == before
    code, deleted = ckpt("prune", *options, "--delete")
    assert code == 0
    assert deleted == listed.replace("would delete", "deleted")
    names = sorted(path.name for path in (run_folder / "checkpoints").iterdir())
    assert names == ["global_step_2", "global_step_4", "latest"]
    assert ckpt("prune", *options) == (0, "nothing to delete: these options keep all 2 checkpoints\n")
