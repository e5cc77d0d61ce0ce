"""What an operator sees of a service, and that nothing is left of one whose launcher was killed.

What clients see when processes die is in test_faults; that a stopped service leaves no process, every test of this
folder says (Service.stop).
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from child import in_child
from listening import listeners, poison
from service import Serve, Service


def test_status_says_how_a_service_is(service: Service) -> None:
    # Would catch an operator who has to read logs to learn who is there.
    xorl = str(Path(sys.executable).with_name("xorl"))
    asked = [xorl, "serve", "status", "--api-port", service.url.rpartition(":")[2]]
    status = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert '"ready": true' in status.stdout, status.stderr


def test_a_second_service_is_refused_on_the_same_folder(service: Service) -> None:
    # Would catch two orchestrators that write one journal.
    command = [sys.executable, "-m", "xorl.server.launcher", *service.arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=service.cwd)
    assert (ended.returncode, "output_dir: another service has" in ended.stderr) == (4, True), ended.stderr


def test_nothing_but_the_api_listens_and_a_killed_launcher_takes_everything_with_it(
    serve: Serve, tmp_path: Path
) -> None:
    # Catches a port to other machines, or one where a pickle becomes code; and workers that go on without anybody who
    # looks after them, and hold the GPUs; also stopped ones.
    own = serve()
    processes = own.running()
    assert len(processes) == 5
    assert own.process is not None
    found = listeners([own.process.pid])
    workers = set(own.worker_pids())
    assert {each.pid for each in found} == {own.pids("API")[-1], *workers}, found  # gloo's, of both ranks
    assert [each for each in found if not each.is_loopback] == []
    assert poison([each for each in found if each.pid in workers], tmp_path / "run") == []
    assert in_child(lambda: own.tinker().create_lora_training_client("xorl/quickstart", rank=8).model_id)
    assert (own.running(), (tmp_path / "run").exists()) == (processes, False)
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    own.process.kill()
    own.process.wait()
    deadline = time.monotonic() + 60
    while any(process.is_left() for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.1)
