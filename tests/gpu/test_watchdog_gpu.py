"""The watchdog where the main thread waits for a GPU: NCCL's kernels hang, and its own timeout comes later."""

import os
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from xorl.core import join, runtime
from xorl.host.failures import LostRankError, StalledError
from xorl.train.watchdog import COLLECTIVE_TIMEOUT, Watchdog

pytestmark = pytest.mark.gpu


def _rank(rank: int, port: int, folder: Path) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in places.items()}})

    def end(error: Exception) -> None:
        (folder / f"ended_{rank}").write_text(f"{type(error).__name__}: {error}")
        os._exit(0)

    peers = join.rendezvous(rank, 2)
    watchdog = Watchdog(end, stall_s=5.0, interval_s=0.2)
    watchdog.start(peers, rank)
    try:
        with watchdog.explaining():
            runtime.init("cuda", timeout_s=COLLECTIVE_TIMEOUT.total_seconds(), peers=peers)
            value = torch.ones(1, device="cuda")
            dist.all_reduce(value)
            torch.cuda.synchronize()
            watchdog.position.move("data", 3)
            if rank == 1:
                time.sleep(120)
            dist.all_reduce(value)
            value.item()
    except (LostRankError, StalledError) as error:
        end(error)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_stall_on_gpus_names_the_rank_that_is_late(tmp_path: Path) -> None:
    # Catches a watchdog that cannot run while a kernel of NCCL waits, and one that blames the rank that waits.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(_rank, (port, tmp_path), nprocs=2)
    texts = {(tmp_path / f"ended_{rank}").read_text() for rank in range(2)}
    assert len(texts) == 1
    [text] = texts
    assert text.startswith("StalledError: no rank has made progress for 5 s\nthe others wait for rank 1 on host ")
    assert "time.sleep(120)" in text.partition("\nrank 1:\n")[2]
    assert "value.item()" in text.partition("\nrank 0:\n")[2]
