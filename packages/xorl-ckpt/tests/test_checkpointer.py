"""A checkpoint holds what was saved, or does not exist."""

import logging
import shutil
from pathlib import Path

import pytest
import torch

from full_disk import full_disk
from tiny_runs import Tensors
from xorl.ckpt import Checkpointer, CheckpointError, CheckpointFailure, Retention, read_manifest
from xorl.ckpt.export import published
from xorl.ckpt.files import FileRecord
from xorl.ckpt.layout import verify
from xorl.ckpt.publish import complete_interrupted, prepare_root, set_aside_after


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_everything_saved_comes_back_to_the_bit(manager, tmp_path, make_state, assert_same):
    # Catches a dtype, a 0-d or an empty tensor, a scalar or a generator state that does not survive.
    rng = {"torch": torch.get_rng_state()}
    info = {"data": {"fingerprint": "ab", "position": 12}}
    path = Checkpointer(tmp_path, manager=manager).save(
        3, make_state(1), info=info, scalars={"best": 0.1 + 0.2}, rng=rng
    )
    assert path == tmp_path / "global_step_3"
    state = make_state(2)
    kept = state["model"]["experts"]
    loaded = Checkpointer(tmp_path).load(path, state)
    assert_same(state, make_state(1))
    assert state["model"]["experts"] is kept
    assert (loaded.step, loaded.info, loaded.scalars) == (3, info, {"best": 0.1 + 0.2})
    assert torch.equal(loaded.rng["torch"], rng["torch"])
    assert verify(path).versions["torch"] == torch.__version__
    assert names_in(tmp_path) == ["global_step_3", "latest"]


def test_module_is_a_part_of_a_state(manager, tmp_path):
    # Catches a state_dict that is not a plain dict, and parameters that require gradients.
    model, other = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    path = Checkpointer(tmp_path, manager=manager).save(1, {"model": model})
    Checkpointer(tmp_path).load(path, {"model": other})
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert other.weight.requires_grad


def test_view_of_large_storage_is_saved_alone(manager, tmp_path):
    # Catches a slice that drags the whole storage into the file.
    large = torch.zeros(1 << 20)
    path = Checkpointer(tmp_path, manager=manager).save(1, {"model": Tensors(a=large[:10])})
    assert sum(record.size for record in verify(path).files.values()) < 100_000


@pytest.mark.parametrize("change", ["flip", "cut", "remove"])
def test_damaged_file_is_named_and_nothing_is_loaded(manager, change, tmp_path, make_state, assert_same):
    # Catches bit rot and torn copies, which neither DCP nor safetensors would notice.
    path = Checkpointer(tmp_path, manager=manager).save(1, make_state(1), rng={"torch": torch.get_rng_state()})
    for name in read_manifest(path).files:
        copy = tmp_path / "copy" / name.replace("/", "_")
        shutil.copytree(path, copy)
        content = bytearray((copy / name).read_bytes())
        if change == "flip":
            content[len(content) // 2] ^= 1
            (copy / name).write_bytes(content)
        elif change == "cut":
            (copy / name).write_bytes(content[:-1])
        else:
            (copy / name).unlink()
        state = make_state(2)
        with pytest.raises(CheckpointError, match=rf"(?s)damaged.*{name}"):
            Checkpointer(tmp_path).load(copy, state)
        assert_same(state, make_state(2))


def test_changed_manifest_is_noticed(tmp_path, make_state):
    # Catches a wrong data position or step that a flipped digit in JSON would give.
    path = Checkpointer(tmp_path).save(1, make_state(), info={"position": 12})
    manifest = path / "metadata.json"
    text = manifest.read_text()
    for wrong in (text.replace('"position": 12', '"position": 13'), text[: len(text) // 2], "[]", ""):
        manifest.write_text(wrong)
        with pytest.raises(CheckpointError, match=r"metadata\.json cannot be used"):
            Checkpointer(tmp_path).load(path, make_state())


def test_checkpoint_of_another_model_lists_the_differences(manager, tmp_path, make_state, assert_same):
    # Catches partial loading: a tensor that is missing, left over, of another shape or dtype.
    path = Checkpointer(tmp_path, manager=manager).save(1, make_state(1))
    state = make_state(2)
    state["model"]["extra"] = torch.zeros(2)
    state["model"]["experts"] = torch.zeros(3, 2, 5)
    state["model"]["layers.0.bias"] = torch.zeros(7)
    del state["optimizer"]["ids"]
    before = {part: Tensors(state[part]) for part in state}
    with pytest.raises(CheckpointError, match="another model") as error:
        Checkpointer(tmp_path).load(path, state)
    text = str(error.value)
    assert "missing from the checkpoint (1): model.extra" in text
    assert "model.experts: saved as float32[3, 2, 4], expected float32[3, 2, 5]" in text
    assert "model.layers.0.bias: saved as bfloat16[7], expected float32[7]" in text
    assert "only in the checkpoint (1): optimizer.ids" in text
    assert_same(state, before)


def test_full_disk_fails_the_save_and_leaves_the_rest(manager, tmp_path, make_state):
    # Catches a save that reports success, hides its error, or spoils the checkpoint before it.
    checkpointer = Checkpointer(tmp_path, manager=manager)
    checkpointer.save(1, make_state(1))
    before = contents(tmp_path)
    large = {"model": Tensors(a=torch.zeros(1 << 18))}
    with full_disk(1 << 16), pytest.raises(CheckpointFailure, match=r"File too large: .*global_step_2"):
        checkpointer.save(2, large)
    assert contents(tmp_path) == before
    assert names_in(tmp_path) == ["global_step_1", "latest"]
    assert checkpointer.save(2, large) == checkpointer.latest()


def test_root_that_cannot_be_written_names_the_option(tmp_path, make_state):
    # Catches a traceback from deep below where the user needs the name of the option.
    (tmp_path / "file").touch()
    checkpointer = Checkpointer(tmp_path / "file" / "checkpoints", root_option="train.output_dir")
    with pytest.raises(CheckpointError, match=r"train\.output_dir: cannot write to .*Not a directory"):
        checkpointer.save(1, make_state())
    prepare_root(tmp_path / "new", "root")
    assert list((tmp_path / "new").iterdir()) == []


def test_existing_step_is_never_written_to(tmp_path, make_state):
    # Catches two runs that mix in one folder; a second save of the same state is no mistake.
    checkpointer = Checkpointer(tmp_path)
    path = checkpointer.save(1, make_state(1))
    before = contents(tmp_path)
    assert checkpointer.save(1, make_state(1)) == path
    other = Checkpointer(tmp_path, root_option="train.output_dir")
    with pytest.raises(CheckpointError, match=r"train\.output_dir: .*global_step_1 already exists"):
        other.save(1, make_state(2))
    other.load(path, make_state())
    assert other.save(1, make_state(1)) == path
    assert contents(tmp_path) == before


def test_latest_follows_saves_and_falls_back(tmp_path, caplog, make_state):
    # Catches `auto` that resumes from an old, a missing or a half written checkpoint.
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.latest() is None
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        checkpointer.resolve("auto")
    for step in (9, 10):
        checkpointer.save(step, make_state(step))
        assert checkpointer.resolve("auto") == tmp_path / f"global_step_{step}"
    (tmp_path / "global_step_11").mkdir()
    for broken, reason in {
        "global_step_11": "global_step_11 has no metadata.json",
        "global_step_99": "global_step_99 is missing",
        "../elsewhere": "names '../elsewhere'",
        "": "names ''",
    }.items():
        (tmp_path / "latest").write_text(broken)
        with caplog.at_level(logging.WARNING):
            assert checkpointer.latest() == tmp_path / "global_step_10"
        assert "event=latest_unusable" in caplog.text
        assert reason in caplog.text
        caplog.clear()
    (tmp_path / "latest").unlink()
    assert checkpointer.latest() == tmp_path / "global_step_10"


def test_latest_of_an_earlier_branch_is_kept(tmp_path, make_state):
    # Catches `auto` that jumps to a higher step which a run left behind when it went back.
    checkpointer = Checkpointer(tmp_path)
    for step in (10, 30, 20):
        checkpointer.save(step, make_state(step))
    assert checkpointer.latest() == tmp_path / "global_step_20"


def test_crash_between_publishing_and_latest_loses_nothing(tmp_path, caplog, make_state):
    # Catches a run that trains again to a step that exists already, and then cannot save.
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(10, make_state(1))
    pointer = (tmp_path / "latest").read_text()
    checkpointer.save(20, make_state(2))
    (tmp_path / "latest").write_text(pointer)
    assert checkpointer.latest() == tmp_path / "global_step_20"
    assert "event=latest_behind" in caplog.text
    (tmp_path / ".saving_global_step_30_0").mkdir()
    complete_interrupted(tmp_path)
    assert caplog.text.count("event=latest_behind") == 1
    assert names_in(tmp_path) == ["global_step_10", "global_step_20", "latest"]
    assert (tmp_path / "latest").read_text() == "global_step_20\n"


def test_leftovers_of_a_crash_go_at_the_next_save(tmp_path, make_state):
    # Catches a disk that fills with torn saves, and a torn save that stands in the way of its successor.
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, make_state())
    for leftover in (".saving_global_step_2", ".saving_global_step_5", ".deleting_global_step_0"):
        (tmp_path / leftover / "training_state").mkdir(parents=True)
        (tmp_path / leftover / "__0_0.distcp").write_bytes(b"torn")
    assert [path.name for path in checkpointer.checkpoints()] == ["global_step_1"]
    checkpointer.save(2, make_state())
    assert names_in(tmp_path) == ["global_step_1", "global_step_2", "latest"]


def test_a_save_leaves_an_export_beside_it_alone(tmp_path, make_state):
    """Catches a run whose next save removes the export of an earlier checkpoint, which another process still writes."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, make_state())
    with published(tmp_path / "global_step_1-hf") as temporary:
        (temporary / "model.safetensors").write_bytes(b"half")
        checkpointer.save(2, make_state())
        assert [path.name for path in checkpointer.checkpoints()] == ["global_step_1", "global_step_2"]
        (temporary / "config.json").write_bytes(b"{}")
    assert names_in(tmp_path / "global_step_1-hf") == ["config.json", "model.safetensors"]
    assert names_in(tmp_path) == ["global_step_1", "global_step_1-hf", "global_step_2", "latest"]


def test_what_a_killed_export_left_goes_with_the_next_one(tmp_path):
    """Catches files of an export that was killed, which stay for ever or come to stand in the next one."""
    (tmp_path / ".exporting_new").mkdir()
    (tmp_path / ".exporting_new" / "model-00002-of-00002.safetensors").write_bytes(b"torn")
    with published(tmp_path / "new") as temporary:
        (temporary / "model.safetensors").write_bytes(b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.safetensors"]


def test_old_checkpoints_go_when_asked(tmp_path, make_state):
    # Catches pruning before publishing, and pruning of what `latest` names.
    checkpointer = Checkpointer(tmp_path, retention=Retention(last=2))
    for step in (1, 2, 10):
        checkpointer.save(step, make_state())
    assert [path.name for path in checkpointer.checkpoints()] == ["global_step_2", "global_step_10"]
    checkpointer.save(3, make_state())
    assert checkpointer.latest() == tmp_path / "global_step_3"
    Checkpointer(tmp_path, retention=Retention(last=1)).save(4, make_state())
    assert [path.name for path in checkpointer.checkpoints()] == ["global_step_4", "global_step_10"]


def test_retention_keeps_the_newest_the_milestones_and_the_best():
    # Catches a best checkpoint that goes because it is old, and a NaN that is taken for the lowest loss.
    losses = {2: 0.5, 4: 0.3, 6: 0.3, 8: float("nan"), 99: 0.1}
    steps = [2, 4, 6, 8, 10, 12]
    assert Retention(last=2).kept(steps) == {10, 12}
    assert Retention(last=1, every=4).kept(steps) == {4, 8, 12}
    assert Retention(last=1, best=1, losses=lambda: losses).kept(steps) == {6, 12}
    assert Retention(last=1, best=2, losses=lambda: losses).kept(steps) == {4, 6, 12}


def test_what_is_later_is_set_aside_with_its_exports(tmp_path, make_state):
    # Catches a later checkpoint that `auto` finds after a run went back, or that is lost.
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 10, 20):
        checkpointer.save(step, make_state(step))
    for name in ("global_step_10-export", "global_step_1-hf", "global_step_30"):
        (tmp_path / name).mkdir()
    assert set_aside_after(tmp_path, 1, tmp_path / "global_step_1") == tmp_path / "set_aside_1"
    later = ["global_step_10", "global_step_10-export", "global_step_20", "global_step_30"]
    assert names_in(tmp_path / "set_aside_1") == later
    assert names_in(tmp_path) == ["global_step_1", "global_step_1-hf", "latest", "set_aside_1"]
    assert checkpointer.latest() == tmp_path / "global_step_1"
    assert set_aside_after(tmp_path, 1, tmp_path / "global_step_1") is None
    verify(tmp_path / "set_aside_1" / "global_step_20")
    checkpointer.load(tmp_path / "global_step_1", make_state())
    checkpointer.save(10, make_state(11))
    assert set_aside_after(tmp_path, 0, None) == tmp_path / "set_aside_2"
    assert checkpointer.latest() is None


@pytest.mark.parametrize("last", range(1, 5))
def test_going_back_that_is_interrupted_is_completed_the_next_time(last, tmp_path, make_state, monkeypatch):
    # Catches a checkpoint that is lost, or a `latest` that names none, when a run is killed while it goes back.
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2, 3, 4):
        checkpointer.save(step, make_state(step))
    rename, replace, calls = Path.rename, Path.replace, []

    def count(change):
        def counted(path: Path, target: Path) -> Path:
            calls.append(path)
            if len(calls) == last:
                raise KeyboardInterrupt
            return change(path, target)

        return counted

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", count(rename))
        patched.setattr(Path, "replace", count(replace))
        with pytest.raises(KeyboardInterrupt):
            set_aside_after(tmp_path, 1, tmp_path / "global_step_1")
    assert checkpointer.latest() is not None
    set_aside_after(tmp_path, 1, tmp_path / "global_step_1")
    complete_interrupted(tmp_path)
    assert checkpointer.latest() == tmp_path / "global_step_1"
    assert sorted(path.name for path in tmp_path.glob("set_aside_*/*")) == [f"global_step_{step}" for step in (2, 3, 4)]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["latest"]


def test_damage_names_the_checkpoint_to_load_instead(tmp_path, make_state):
    # Catches advice that does not help, such as to resume from the newest checkpoint, which is the damaged one.
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2, 3):
        checkpointer.save(step, make_state(step))
    for damaged in ("metadata.json", "training_state/scalars.json", ".metadata"):
        file = tmp_path / "global_step_3" / damaged
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(CheckpointError) as error:
            checkpointer.load(checkpointer.resolve("auto"), make_state())
        assert f"load {tmp_path / 'global_step_2'}, the checkpoint before it" in str(error.value)
        assert checkpointer.load(tmp_path / "global_step_2", make_state()).step == 2
        file.write_bytes(content)


def test_any_folder_of_ours_is_accepted(tmp_path, monkeypatch, make_state, assert_same):
    # Catches a path that only works when it is spelled as we would.
    root = tmp_path / "checkpoints"
    checkpointer = Checkpointer(root)
    path = checkpointer.save(7, make_state(7))
    moved = tmp_path / "step_7"
    shutil.copytree(path, moved)
    monkeypatch.chdir(tmp_path)
    for given, expected in (
        (path, path),
        (str(path), path),
        ("global_step_7", path),
        ("checkpoints/global_step_7/", path),
        ("step_7", moved),
        ("checkpoints/../step_7", moved),
    ):
        assert checkpointer.resolve(given) == expected
    state = make_state()
    assert Checkpointer(root).load(moved, state).step == 7
    assert_same(state, make_state(7))
    (root / "step_8").mkdir()
    run = tmp_path / "run" / "checkpoints"
    shutil.copytree(path, run / "global_step_7")
    for wrong, message in (
        ("nowhere", "does not exist"),
        (root, r"is not a complete checkpoint\. Found .*global_step_7"),
        (run.parent, r"run is not a complete checkpoint\. Found .*run/checkpoints/global_step_7"),
        (root / "step_8", "is not a complete checkpoint"),
    ):
        with pytest.raises(CheckpointError, match=message):
            checkpointer.resolve(wrong)
    with pytest.raises(CheckpointError, match="not a complete xorl checkpoint"):
        Checkpointer(root).load(root / "step_8", make_state())


def test_a_name_is_not_saved_again_with_another_step(tmp_path, make_state):
    # Catches a save that reports success while the old weights stay, and one that fails after it deleted them.
    checkpointer = Checkpointer(tmp_path)
    path = checkpointer.save(1, make_state(1), name="final")
    assert checkpointer.save(1, make_state(1), name="final") == path
    with pytest.raises(CheckpointError, match="final already exists"):
        checkpointer.save(2, make_state(2), name="final")
    lost = {"lost.json": FileRecord(1, "0")}
    with pytest.raises(CheckpointError, match="does not see lost"):
        checkpointer.save(2, make_state(2), name="final", replaces=True, write_extra_files=lambda _: lost)
    assert read_manifest(path).step == 1
    checkpointer.save(2, make_state(2), name="final", replaces=True)
    assert read_manifest(path).step == 2
