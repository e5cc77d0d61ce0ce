"""A save in the background holds the state of the moment at which it was started."""

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import filesystem

from tiny_runs import Tensors
from xorl.ckpt import BackgroundWriter, Checkpointer, CheckpointFailure, read_manifest
from xorl.ckpt.files import write_file


@pytest.fixture
def background():
    writer = BackgroundWriter()
    yield writer
    writer.close()


def files_of(folder: Path) -> dict[str, bytes]:
    """The files with values; the manifest has the name of the checkpoint before, and .metadata an id of its own."""
    names = [name for name in read_manifest(folder).files if name != ".metadata"]
    return {name: (folder / name).read_bytes() for name in names}


def test_the_same_files_result_although_the_state_has_changed(manager, background, tmp_path, make_state):
    # Catches a copy that shares memory with the state, a dtype or shape that the host memory loses, and files that
    # differ from those of a save in the foreground.
    state, rng = make_state(1), {"torch": torch.get_rng_state()}
    first = Checkpointer(tmp_path / "foreground", manager=manager).save(3, state, scalars={"x": 1}, rng=rng)
    may_write = threading.Event()
    second = Checkpointer(tmp_path / "background", manager=manager).save(
        3, state, scalars={"x": 1}, rng=rng, background=background, write_extra_files=lambda _: may_write.wait() and {}
    )
    background.before_change()
    for part in state.values():
        for tensor in part.values():
            tensor.zero_()
    assert not second.exists()
    may_write.set()
    background.finish()
    assert files_of(second) == files_of(first)
    assert read_manifest(second).tensors == read_manifest(first).tensors


def test_writing_does_not_wait_for_a_gpu(background, tmp_path, monkeypatch, make_state, assert_same):
    # Catches DCP's way to copy ahead from a GPU, which waits for the work that is queued there.
    def refuse(*args, **options):
        raise AssertionError("waits for the GPU")

    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    Checkpointer(tmp_path).save(1, make_state(1), background=background)
    background.finish()
    monkeypatch.undo()
    state = make_state()
    Checkpointer(tmp_path).load(tmp_path / "global_step_1", state)
    assert_same(state, make_state(1))


def test_one_save_is_written_at_a_time_into_memory_that_is_reused(background, tmp_path, make_state, assert_same):
    # Catches a second save that overwrites the copies of the first, and memory that grows with each save.
    checkpointer, published = Checkpointer(tmp_path), []
    for step in (1, 2, 3):
        checkpointer.save(step, make_state(step), background=background, on_published=published.append)
        assert len(published) >= step - 1
    background.finish()
    assert [path.name for path in published] == ["global_step_1", "global_step_2", "global_step_3"]
    for step in (1, 2, 3):
        state = make_state()
        checkpointer.load(tmp_path / f"global_step_{step}", state)
        assert_same(state, make_state(step))
    memory = background._memory._memory
    checkpointer.save(4, make_state(4), background=background)
    background.finish()
    assert background._memory._memory is memory
    background.close()
    assert background._memory._memory is None


def test_a_failure_is_raised_once_and_the_next_save_succeeds(background, tmp_path, make_state):
    # Catches a save that fails without a word, and one whose failure ends all later ones.
    def fails(folder: Path) -> dict:
        write_file(folder / "one", b"1")
        raise OSError(28, "No space left on device")

    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, make_state(1), background=background)
    checkpointer.save(2, make_state(2), background=background, write_extra_files=fails)
    background._writing.exception()  # wait for it
    assert background.has_failed
    with pytest.raises(OSError, match="No space left"):
        background.finish()
    assert not background.has_failed
    background.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", "latest"]
    checkpointer.save(2, make_state(2), background=background)
    background.finish()
    assert checkpointer.latest() == tmp_path / "global_step_2"


def test_what_a_living_process_writes_stays(background, tmp_path, make_state):
    # Catches a save that removes the files of another one, which another thread or process still writes.
    may_write, writes = threading.Event(), threading.Event()

    def wait(_: Path) -> dict:
        writes.set()
        may_write.wait()
        return {}

    Checkpointer(tmp_path).save(1, make_state(1), name="one", background=background, write_extra_files=wait)
    writes.wait()
    Checkpointer(tmp_path).save(2, make_state(2))
    code = "from pathlib import Path; from xorl.ckpt.publish import remove_leftovers;"
    run_python(f"{code} remove_leftovers(Path({str(tmp_path)!r}))")
    may_write.set()
    background.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_2", "latest", "one"]


def test_what_a_killed_process_was_writing_goes(tmp_path, make_state):
    # Catches an owner that is taken for alive, and so a disk that fills with torn saves.
    code = "import os, signal; from pathlib import Path; from xorl.ckpt.publish import create_folder;"
    run_python(f"{code} create_folder(Path({str(tmp_path)!r}), 'global_step_1'); os.kill(os.getpid(), signal.SIGKILL)")
    assert any(tmp_path.iterdir())
    Checkpointer(tmp_path).save(2, make_state())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_2", "latest"]


def test_a_disk_that_is_too_small_is_noticed_before_writing(tmp_path, make_state, monkeypatch):
    # Catches a save that fills the disk of everyone else before it fails.
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, make_state())
    with pytest.raises(
        CheckpointFailure, match=r"No space left .* needs 2\.\d\d MiB, but the disk of .* has only 1\.00 MiB"
    ):
        checkpointer.save(2, {"model": Tensors(a=torch.zeros(1 << 19))})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", "latest"]


ENDINGS = {
    # how the process ends: what it tells of the save
    "": "event=checkpoint_lost path={path} error=the process ended before it was written",
    "may_write.set(); writer.writing.exception()": "",
    "may_write.set(); writer.finish()": "",
    "fails.set(); may_write.set(); writer.writing.exception()": "path={path} error=[Errno 28] No space left",
}
# Forks a process for each ending, which ends as any interpreter does: with its threads and exit handlers.
SAVE_AND_END = """
import os, sys, threading, torch
from pathlib import Path
from xorl.ckpt import BackgroundWriter, Checkpointer
folder, *endings = sys.argv[1:]
for number, ending in enumerate(endings):
    if os.fork():
        os.wait()
        continue
    os.dup2(os.open(f"{folder}/{number}.log", os.O_WRONLY | os.O_CREAT), 2)
    may_write, fails, writer = threading.Event(), threading.Event(), BackgroundWriter()
    def extra(folder):
        may_write.wait()
        if fails.is_set():
            raise OSError(28, "No space left on device")
        return {}
    state = {"model": torch.nn.Linear(2, 2)}
    Checkpointer(f"{folder}/{number}").save(1, state, background=writer, write_extra_files=extra)
    exec(ending)
    break
"""


def test_a_save_that_nobody_waited_for_is_not_lost_without_a_word(tmp_path):
    # Catches a process that ends with exit code 0 while its last checkpoint was never written.
    run_python(SAVE_AND_END, str(tmp_path), *ENDINGS)
    for number, expected in enumerate(ENDINGS.values()):
        told = (tmp_path / f"{number}.log").read_text()
        assert expected.format(path=tmp_path / str(number) / "global_step_1") in told
        assert bool(expected) == ("checkpoint_lost" in told)


def run_python(code: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-c", code, *arguments], check=False, timeout=60)
