"""Processes that are stopped: each is noticed, named and replaced within the stated time, and calls are answered.

One service serves all of it, in this order; each test leaves it working. Ranks that are stuck are in test_worker_watch.
"""

import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from caller import NEAR, Caller, rounds
from service import Running, Serve, Service

LIMIT_S = 10.0
# With the start of new workers beside other tests.
WITHIN_S = 120.0


@pytest.fixture(scope="module")
def service(serve: Serve) -> Service:
    return serve(skip_initial_checkpoint=True, worker_stall_timeout=LIMIT_S)


@pytest.fixture(scope="module")
def plain(service: Service) -> list[float]:
    """What undisturbed rounds give; all adapters begin alike."""
    return rounds(Caller(service), 2)


def stop(pid: int) -> Running:
    process = Running.of(pid)
    assert process is not None
    os.kill(pid, signal.SIGSTOP)
    return process


def status_of(service: Service, name: str) -> dict:
    shown = httpx.get(f"{service.url}/status.json", trust_env=False, timeout=10).json()
    return next(one for one in shown["processes"] if one["name"] == name)


@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_that_is_stopped_in_a_call_is_replaced_and_the_call_is_answered(
    service: Service, plain: list[float], rank: int
) -> None:
    # Catches a service in which all calls wait for ever for a rank that is there and does nothing.
    caller = Caller(service)
    losses = rounds(caller, 1)
    num_before = status_of(service, "workers")["num_restarts"]
    long = caller.post("forward_backward", **caller.body(4, num=2000))["request_id"]
    stopped = stop(service.worker_pids()[rank])
    begun = time.monotonic()
    assert caller.result(long, WITHIN_S)["metrics"]["loss:sum"] == pytest.approx(2000 * plain[2], rel=NEAR)
    assert time.monotonic() - begun > LIMIT_S / 2
    assert losses == pytest.approx(plain[:2], rel=NEAR)
    status = status_of(service, "workers")
    assert (status["num_restarts"], status["hung_since"]) == (num_before + 1, None)
    named = f"rank {rank} (process {stopped.pid}) gave no sign of life for"
    assert named in status["reason"]
    assert "is stopped (state T)" in status["reason"]
    assert "event=hung name=workers" in service.log
    # The other rank says where it waits.
    assert "Current thread" in service.log.partition(named)[2]
    assert not stopped.is_left()


def test_an_idle_rank_that_is_stopped_is_replaced_without_a_call(service: Service, plain: list[float]) -> None:
    # Catches a hang that the next client finds.
    num_before = status_of(service, "workers")["num_restarts"]
    stopped = stop(service.worker_pids()[1])
    deadline = time.monotonic() + WITHIN_S
    while status_of(service, "workers")["num_restarts"] == num_before:
        assert time.monotonic() < deadline, service.log
        time.sleep(0.2)
    hung_since = status_of(service, "workers")["hung_since"]
    assert hung_since is not None
    assert not stopped.is_left()
    assert rounds(Caller(service), 1) == pytest.approx(plain[:2], rel=NEAR)


def test_everything_else_that_is_stopped_is_replaced(service: Service, plain: list[float]) -> None:
    # Catches an API that accepts connections and never answers, and an orchestrator for which it waits.
    caller = Caller(service)
    losses = rounds(caller, 1)
    before = {name: service.pids(name)[-1] for name in ("workers", "orchestrator", "API")}
    left = [stop(pid) for pid in before.values()]
    ranks = [process for pid in service.worker_pids() if (process := Running.of(pid)) is not None]
    deadline = time.monotonic() + WITHIN_S
    while any(service.pids(name)[-1] == pid for name, pid in before.items()):
        assert time.monotonic() < deadline, service.log
        time.sleep(0.2)
    service.wait_ready(WITHIN_S)
    assert not [process for process in [*left, *ranks] if process.is_left()]
    caller.connect()
    losses.append(caller.loss(caller.forward_backward(4)))
    assert losses == pytest.approx(plain[:3], rel=NEAR)
    for name in before:
        assert "is stopped (state T)" in status_of(service, name)["reason"]


def test_a_service_that_is_suspended_as_a_whole_goes_on_where_it_was(service: Service, plain: list[float]) -> None:
    # Catches a service that finds all its processes silent once a scheduler lets it continue, and kills them.
    caller = Caller(service)
    losses = rounds(caller, 1)
    assert service.process is not None
    pids = [service.process.pid, *(process.pid for process in service.running())]
    for number, seconds in ((signal.SIGSTOP, 1.5 * LIMIT_S), (signal.SIGCONT, LIMIT_S / 2)):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(seconds)
    assert [service.process.pid, *(process.pid for process in service.running())] == pids
    caller.connect()
    losses.append(caller.loss(caller.forward_backward(4)))
    assert losses == pytest.approx(plain[:3], rel=NEAR)


def test_a_service_stops_although_its_processes_are_stopped(service: Service) -> None:
    # Catches a stop that waits half an hour for an orchestrator that cannot hear it, or for ranks that never answer.
    stop(service.pids("orchestrator")[-1])
    stop(service.worker_pids()[1])
    begun = time.monotonic()
    assert service.stop() == 0
    assert time.monotonic() - begun < WITHIN_S
    assert Path(service.output_dir).is_dir()
