"""Gloo ranks for the tests: `run_ranks` calls one function in them, and `launch` computes a table of cells.

`run_command` runs `xorl train` in a process that is forked.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch._dynamo  # FSDP2 would import it in every forked rank, as the command would import xorl.train

import xorl.train  # noqa: F401
from ports import free_port
from ranks import Failure, Launch, Launches, run_rank, run_to_the_end
from xorl.cli import train as train_command
from xorl.cli.arguments import run_module

# Autograd looks for devices in its first backward pass. After a test with fake tensors or a compiler it would find one,
# start a thread for it, and no rank that is forked later could differentiate anything.
torch.zeros((), requires_grad=True).backward()

RunRanks = Callable[[Callable[[], object], int], list]


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """(function, number of ranks) -> results in rank order; an error in a rank fails the test with its traceback.

    As ranks are forked, the function may be a closure.
    """

    def run(function: Callable[[], object], world_size: int) -> list:
        port = free_port()
        files = [tmp_path / f"result_{world_size}_{rank}_{port}.pt" for rank in range(world_size)]
        context = get_context("fork")
        processes = [
            context.Process(target=run_rank, args=(function, rank, world_size, port, files[rank]))
            for rank in range(world_size)
        ]
        hung = run_to_the_end(processes)
        results = [torch.load(file, weights_only=False) if file.exists() else "no result" for file in files]
        failures = [str(result) for result in results if isinstance(result, Failure)]
        assert not failures, "\n".join(failures)
        assert not hung, f"ranks {hung} hung"
        return results

    return run


@pytest.fixture(scope="module")
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """(cells) -> their results, which tests of the module share; call it once in a module."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return partial(Launches, base / "cells" / request.module.__name__.rpartition(".")[2])


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    returncode: int | None
    stderr: str


RunCommand = Callable[..., Ended]


@pytest.fixture
def run_command(tmp_path: Path) -> RunCommand:
    """(arguments of `xorl train`, prepare=None) -> how it ended; `prepare` is called in its process first."""

    def run(*arguments: str, prepare: Callable[[], None] | None = None) -> Ended:
        file = tmp_path / "stderr"
        process = get_context("fork").Process(target=_command, args=(arguments, prepare, file))
        hung = run_to_the_end([process])
        assert not hung, f"the command hung:\n{file.read_text()}"
        return Ended(process.exitcode, file.read_text())

    return run


def _command(arguments: Sequence[str], prepare: Callable[[], None] | None, file: Path) -> None:
    with file.open("w", buffering=1) as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        sys.stdout = sys.stderr = output
        sys.argv = ["xorl train", *arguments]
        torch.set_num_threads(1)
        code: object = 1
        try:
            if prepare is not None:
                prepare()
            run_module(train_command.app, train_command.MODULE)
        except SystemExit as ended:
            code = ended.code
        except BaseException:  # noqa: BLE001 - as the interpreter would do at its end
            traceback.print_exc()
        output.flush()
    os._exit(code if isinstance(code, int) else 0)
