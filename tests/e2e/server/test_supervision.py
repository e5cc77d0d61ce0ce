"""What a service does when parts of it die, and when it is stopped: nothing is lost, and nothing is left behind."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tinker
from tinker import types

from service import Service

TOKENS = [5, 9, 13, 22, 17, 9, 30, 41, 12]
DATUM = {"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)}


def step(model: tinker.TrainingClient) -> float:
    """One forward_backward and one optimizer step; returns the loss."""
    datum = types.Datum(types.ModelInput.from_ints(TOKENS[:-1]), DATUM)
    losses = model.forward_backward([datum], "cross_entropy")
    model.optim_step(types.AdamParams(learning_rate=1e-3)).result(timeout=120)
    return losses.result(timeout=120).metrics["loss:sum"]


def until(is_so: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("name", ["API", "orchestrator", "workers"])
def test_a_client_trains_on_when_a_process_was_killed(service: Service, name: str) -> None:
    # Would catch a crash that a client sees as anything but a pause, or that leaves other gradients or weights behind.
    alone = service.tinker().create_lora_training_client("xorl/quickstart", rank=4, seed=1).result(timeout=120)
    expected = [step(alone) for _ in range(4)]
    model = service.tinker().create_lora_training_client("xorl/quickstart", rank=4, seed=1).result(timeout=120)
    losses = [step(model), step(model)]
    before = service.pids(name)[-1]
    service.kill(name)
    until(lambda: service.pids(name)[-1] != before)
    losses += [step(model), step(model)]
    assert losses == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < losses[0]


def test_a_stopped_service_leaves_no_process_and_goes_on(service: Service) -> None:
    # Would catch orphans that hold GPUs and ports, and a stop after which a client's model is gone.
    model = service.tinker().create_lora_training_client("xorl/quickstart", rank=4, seed=2).result(timeout=120)
    first = step(model)
    pids = [service.pids(name)[-1] for name in ("workers", "orchestrator", "API")] + service.worker_pids()
    assert len(pids) == 5
    assert service.stop() == 0, service.log
    assert [pid for pid in pids if is_running(pid)] == []
    service.start()
    assert step(model) < first


def test_status_says_how_a_service_is(service: Service) -> None:
    # Would catch an operator who has to read logs to learn who is there.
    xorl = str(Path(sys.executable).with_name("xorl"))
    asked = [xorl, "serve", "status", "--api-port", service.url.rpartition(":")[2]]
    status = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert '"ready": true' in status.stdout, status.stderr


def test_a_killed_launcher_takes_everything_with_it(service: Service) -> None:
    # Would catch workers that go on without anybody who looks after them, and hold the GPUs.
    pids = [service.pids(name)[-1] for name in ("workers", "orchestrator", "API")] + service.worker_pids()
    assert service.process is not None
    service.process.kill()
    service.process.wait()
    until(lambda: not any(is_running(pid) for pid in pids))
