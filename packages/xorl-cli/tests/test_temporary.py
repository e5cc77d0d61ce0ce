"""Folders in the temporary one: there as long as anybody uses them, and no longer than until the next one is made."""

import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from xorl.host import temporary
from xorl.host.temporary import NOTE, temporary_folder

KEEPER = """
import sys, time
from pathlib import Path
from xorl.host.temporary import *
with keep_folder(Path(sys.argv[1])) if sys.argv[1:] else temporary_folder() as found:
    print(found if sys.argv[1:] else found.path, flush=True)
    time.sleep(60)
"""


def test_the_folder_of_a_killed_process_goes_with_the_next_one_once_nobody_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Would catch folders that pile up, and one that is taken from a process that runs.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ExitStack() as stack:

        def keep(*arguments: str) -> tuple[subprocess.Popen[str], str]:
            command = [sys.executable, "-c", KEEPER, *arguments]
            keeper = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(keeper.kill)
            return keeper, keeper.stdout.readline().strip()

        maker, folder = keep()
        user, parent = keep(folder)
        assert parent == str(maker.pid)
        for keeper, is_left in ((None, True), (maker, True), (user, False)):
            if keeper is not None:
                keeper.kill()
                keeper.wait()
            with temporary_folder() as (own, _):
                assert set(tmp_path.glob("xorl_*")) == ({own, Path(folder)} if is_left else {own})
    assert not list(tmp_path.glob("xorl_*"))


def test_what_another_host_has_in_a_shared_folder_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Would catch a running job that loses its folder where locks are one host's.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"{temporary.PREFIX}foreign").mkdir()
    (tmp_path / f"{temporary.PREFIX}foreign" / NOTE).write_bytes(b"\xff")
    for host in ("another", socket.gethostname()):
        folder = tmp_path / f"{temporary.PREFIX}{host}"
        folder.mkdir()
        (folder / NOTE).write_text(f"1 {host}")
    with temporary_folder() as (own, _):
        assert set(tmp_path.iterdir()) == {
            own,
            *(tmp_path / f"{temporary.PREFIX}{name}" for name in ("another", "foreign")),
        }


RANK = """
import os, time
print("begun", flush=True)
while os.getppid() == int(os.environ["XORL_PARENT"]):
    time.sleep(0.05)
"""


def test_what_killed_ranks_of_the_service_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Would catch a folder more for each time that a service's ranks are killed.
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "xorl.server.ranks", "1", str(tmp_path / "rank.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as ranks:
        assert ranks.stdout.readline() == b"begun\n"
        ranks.kill()
    assert list(folder.glob("xorl*"))
    with temporary_folder():
        pass
    assert not list(folder.glob("xorl*"))


KILLED_VERIFICATION = """
import os, signal, sys
from pathlib import Path
from xorl.cli import verify
verify.num_gpus = lambda: 0
verify._Job.run = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
verify._start(verify._Job(Path(sys.argv[1]), (), 0, is_full=True, with_traceback=False), 1)
"""


def test_what_a_killed_verification_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches gradients of whole models that pile up.
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {{config_path: none}}\ndata: {{datasets: [{{path: dummy}}]}}\ntrain: {{output_dir: {tmp_path}}}\n"
    )
    ended = subprocess.run([sys.executable, "-c", KILLED_VERIFICATION, str(config)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert list(folder.glob("xorl*"))
    with temporary_folder():
        pass
    assert not list(folder.glob("xorl*"))
