"""run_ranks: call a function in several gloo ranks and get back what each returns."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch._dynamo  # imported once here: FSDP2 would import it in every forked rank

from xorl.core import runtime

# Autograd looks for devices in its first backward pass. After a test with fake tensors or a compiler it would find one,
# start a thread for it, and no rank that is forked later could differentiate anything.
torch.zeros((), requires_grad=True).backward()

RunRanks = Callable[[Callable[[], object], int], list]


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """(function, number of ranks) -> results in rank order; an error in a rank fails the test with its traceback.

    Ranks are forked, so that the function may be a closure and torch is imported once.
    """

    def run(function: Callable[[], object], world_size: int) -> list:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = get_context("fork")
        files = [tmp_path / f"result_{world_size}_{rank}_{port}.pt" for rank in range(world_size)]
        processes = [
            context.Process(target=_rank, args=(function, rank, world_size, port, files[rank]))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=240)
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
        results = [torch.load(file, weights_only=False) if file.exists() else "no result" for file in files]
        failures = [str(result) for result in results if isinstance(result, _Failure)]
        assert not failures, "\n".join(failures)
        assert not hung, f"ranks {hung} hung"
        return results

    return run


class _Failure(str):
    pass


def _rank(function: Callable[[], object], rank: int, world_size: int, port: int, file: Path) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    # A forked child must not touch the thread pool that its parent started.
    torch.set_num_threads(1)
    try:
        runtime.init("cpu", timeout_s=120)
        result = function()
        runtime.shutdown()
    except BaseException:  # noqa: BLE001 - the test shows it
        result = _Failure(f"rank {rank}:\n{traceback.format_exc()}")
    torch.save(result, file)
    os._exit(0)
