"""The service's ranks under their watchdog: the launcher is told of a stuck one, a slow one goes on."""

import logging
import os
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import torch.distributed as dist

from sockets import ipc_address
from worker_ranks import datum, done, service_config, shards
from xorl.core import join, runtime
from xorl.server.channel import BlockingServer
from xorl.server.hangs import NOTICE_FILE, Hang, HangWatch
from xorl.server.messages import Cancel, Work
from xorl.server.operations import BaseSampler, CreateModel, ForwardBackward, Sample
from xorl.server.worker.base import build_base
from xorl.server.worker.serve import CancelledIds, lead
from xorl.server.worker.watch import idle_s, watchdog_of
from xorl.server.worker.worker import Worker
from xorl.train.watchdog import Position, Watchdog

STALL_S = 3.0


def watched_worker(folder: Path) -> tuple[Worker, Watchdog]:
    """This rank's worker with a model, and its watchdog, which watches."""
    position = Position(step=None)
    config = service_config(folder, worker_stall_timeout=STALL_S, **shards(dist.get_world_size()))
    watchdog = watchdog_of(config, folder, position)
    assert watchdog is not None
    worker = Worker(build_base(config, runtime.init("cpu"), position))
    done(worker, CreateModel("m"))
    locations = tuple(join.Location(rank, "host", "one", f"10.0.0.{rank}") for rank in range(dist.get_world_size()))
    store = dist.distributed_c10d._get_default_store()
    watchdog.start(join.Peers(store, locations) if len(locations) > 1 else None, dist.get_rank())
    return worker, watchdog


def stuck(*_: object) -> None:
    time.sleep(120)


def test_a_rank_that_is_stuck_is_named_with_its_stack(tmp_path: Path, run_ranks) -> None:
    # Catches a service that waits for ever for a rank that is stuck in Python, while its threads show that it lives.
    def run() -> None:
        logging.getLogger("xorl.server").addHandler(logging.FileHandler(tmp_path / "log"))
        worker, _ = watched_worker(tmp_path)
        if dist.get_rank() == 1:
            worker.models.engine.forward_backward = stuck  # pyright: ignore[reportAttributeAccessIssue]
        done(worker, ForwardBackward("m", [datum(9, 1), datum(9, 2)], "cross_entropy"))

    assert run_ranks(run, 2) == ["no result"] * 2
    hang = msgspec.json.decode((tmp_path / NOTICE_FILE).read_bytes(), type=Hang)
    waits = "the others wait for rank 1 on host host (10.0.0.1); rank 1 on host host (10.0.0.1): ForwardBackward"
    assert hang.reason == f"no rank has made progress for {STALL_S:g} s; {waits}"
    assert STALL_S <= time.time() - hang.since < STALL_S + 60
    log = (tmp_path / "log").read_text()
    assert log.count("in stuck") == 1
    assert "in stuck" in log.partition("\nrank 1:\n")[2]
    assert "torch/distributed" in log.partition("\nrank 0:\n")[2]
    watch = HangWatch(tmp_path, ["rank 0", "rank 1"], 60.0, takes_notice=True)
    assert watch.look(os.getpid()) == hang
    watch.reset()
    assert watch.look(os.getpid()) is None


def test_a_rank_that_is_stuck_while_there_are_no_calls_is_noticed(tmp_path: Path, run_ranks) -> None:
    # Catches a hang that only the next client finds, who then waits for as long again.
    def run() -> None:
        config = service_config(tmp_path, worker_stall_timeout=STALL_S)
        worker, _ = watched_worker(tmp_path)
        if dist.get_rank() == 1:
            stuck()
        # The other rank may end first.
        with ipc_address("workers") as address, suppress(RuntimeError):
            lead(worker, BlockingServer(address, Work | Cancel), CancelledIds(), idle_s=idle_s(config))
        stuck()

    begun = time.monotonic()
    assert run_ranks(run, 2) == ["no result"] * 2
    assert time.monotonic() - begun < 60
    hang = msgspec.json.decode((tmp_path / NOTICE_FILE).read_bytes(), type=Hang)
    assert "the others wait for rank 1 on host host" in hang.reason


def test_a_long_call_that_advances_is_left_alone(tmp_path: Path, run_ranks) -> None:
    # Catches a large pass or a long sample that is taken for a hang, again and again, until its client gets an error.
    def run() -> list[float]:
        worker, watchdog = watched_worker(tmp_path)
        engine, sampler = worker.models.engine, worker.sampling._sampler
        forward_backward, step = engine.forward_backward, sampler.step

        def slow_pass(rows, loss_fn, model_ids, on_output, whole):
            def take(index: int, output: object) -> None:
                time.sleep(0.3 * STALL_S)
                on_output(index, output)

            return forward_backward(rows, loss_fn, model_ids, take, whole)

        def slow_step(cancelled):
            time.sleep(0.3 * STALL_S)
            return step(cancelled)

        engine.forward_backward, sampler.step = slow_pass, slow_step
        seconds = []
        for operation in (
            ForwardBackward("m", [datum(60, seed) for seed in range(6)], "cross_entropy"),
            Sample(BaseSampler(), datum(4).tokens, max_tokens=6, ignore_end=True),
        ):
            begun = time.monotonic()
            done(worker, operation)
            seconds.append(time.monotonic() - begun)
        watchdog.stop()
        return seconds

    (seconds,) = run_ranks(run, 1)
    assert min(seconds) > 1.5 * STALL_S
    assert not (tmp_path / NOTICE_FILE).exists()
