"""Forked processes, ranks among them, and launches that compute the cells of a table in turn.

A fork has torch imported already: a fresh process takes seconds to be where a fork begins.
"""

import faulthandler
import fcntl
import gc
import os
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch import nn
from torch.distributed import ProcessGroupGloo, Store, distributed_c10d

from ports import free_port
from xorl.core import runtime

Cells = Mapping[tuple, tuple[int, Callable[[], object]]]  # by key: the number of ranks, and what each computes
Launch = Callable[[Cells], "Launches"]
# After so many launches that a cell ended, the others count as failed, too.
MAX_FAILED_CELLS = 3


class Launches:
    """The results of a table's cells, which are files of a folder that workers of pytest-xdist may share.

    The first result that is asked for is waited for with all of as many ranks: one launch computes their cells in turn.
    """

    def __init__(self, folder: Path, cells: Cells) -> None:
        self._folder = folder
        self._cells = cells
        self._files = {key: folder / f"cell_{index}" for index, key in enumerate(cells)}
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, *key: object) -> list:
        """The results of a cell in rank order. Fails if a rank did, with its traceback."""
        num_ranks = self._cells[key][0]
        with (self._folder / f"lock_{num_ranks}").open("a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if lock.seek(0, os.SEEK_END) == 0:
                cells = {self._files[one]: compute for one, (size, compute) in self._cells.items() if size == num_ranks}
                _launch(cells, num_ranks)
                lock.write("computed")
        results = [torch.load(file, weights_only=False) for file in _by_rank(self._files[key], num_ranks)]
        failures = [str(result) for result in results if isinstance(result, Failure)]
        assert not failures, "\n".join(failures)
        return results


def _by_rank(cell: Path, num_ranks: int) -> list[Path]:
    return [cell.with_suffix(f".{rank}.pt") for rank in range(num_ranks)]


def _launch(cells: Mapping[Path, Callable[[], object]], num_ranks: int) -> None:
    """Writes each cell's results, or failures, next to its path."""
    waiting = list(cells)
    for _ in range(MAX_FAILED_CELLS):
        if not waiting:
            return
        port = free_port()
        context = get_context("fork")
        own = {cell: cells[cell] for cell in waiting}
        arguments = [(own, rank, num_ranks, port) for rank in range(num_ranks)]
        processes = [context.Process(target=_cells, args=each) for each in arguments]
        hung = run_to_the_end(processes, timeout_s=600)
        while waiting:
            cell = waiting.pop(0)
            files = _by_rank(cell, num_ranks)
            missing = [file for file in files if not file.exists()]
            for file in missing:
                rank = files.index(file)
                ended = "hung" if rank in hung else f"ended with exit code {processes[rank].exitcode}"
                torch.save(Failure(f"{file.name}: its rank {ended}\n{_last_words(_launch_file(cell, rank))}"), file)
            if missing or any(isinstance(torch.load(file, weights_only=False), Failure) for file in files):
                break
    for cell in waiting:
        for file in _by_rank(cell, num_ranks):
            torch.save(Failure(f"not computed, as {MAX_FAILED_CELLS} cells before it failed"), file)


def _launch_file(cell: Path, rank: int) -> Path:
    return cell.with_name(f"launch.{rank}.pt")


def _last_words(result: Path) -> str:
    """What a rank left about its end: its traceback, or its stacks if native code crashed."""
    words = [str(torch.load(result, weights_only=False))] if result.exists() else []
    stacks = _stacks_file(result)
    return "\n".join(words + ([stacks.read_text()] if stacks.exists() else []))


def _stacks_file(result: Path) -> Path:
    return result.with_suffix(".stacks")


def _cells(cells: Mapping[Path, Callable[[], object]], rank: int, num_ranks: int, port: int) -> None:
    """Computes cells until one fails, which leaves the other ranks of its collectives alone."""

    def compute_all() -> None:
        for cell, compute in cells.items():
            file = _by_rank(cell, num_ranks)[rank]
            file.unlink(missing_ok=True)
            try:
                result = compute()
                _require_no_models()
            except BaseException:  # noqa: BLE001 - the test shows it
                torch.save(Failure(f"rank {rank}:\n{traceback.format_exc()}"), file)
                os._exit(0)
            part = file.with_suffix(".part")
            torch.save(result, part)
            part.rename(file)

    run_rank(compute_all, rank, num_ranks, port, _launch_file(next(iter(cells)), rank))


def _require_no_models() -> None:
    """Raises AssertionError if a model stays in memory after its last use, as by a cycle through C++."""
    gc.collect()
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    left = Counter(type(each).__name__ for each in modules if next(each.parameters(), None) is not None)
    assert not left, f"left in memory: {dict(left)}"


def run_to_the_end(processes: Sequence[BaseProcess], timeout_s: float = 240) -> list[int]:
    """Starts the processes, waits for them, and returns which had to be killed."""
    runtime.shutdown()  # they would inherit the group that a run in this process left, but not the group's threads
    # The garbage collector of a child would write to, and so copy, every page of what it has from its parent.
    gc.freeze()
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=timeout_s)
    hung = [index for index, process in enumerate(processes) if process.is_alive()]
    for index in hung:
        processes[index].kill()
        processes[index].join()
    return hung


class Failure(str):
    pass


class OneGlooDevice(ProcessGroupGloo):
    """A group of gloo's on the process's only device.

    A device's thread polls its sockets a hundred times a second. With a device for each of the hundreds of groups that
    a launch makes, this took half of the processors' time.
    """

    device: ProcessGroupGloo.Device | None = None

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        if OneGlooDevice.device is None:
            OneGlooDevice.device = ProcessGroupGloo.create_device(interface="lo")
        options = ProcessGroupGloo._Options()
        options._timeout, options._devices, options._threads = timeout, [OneGlooDevice.device], 2
        super().__init__(store, rank, size, options)


def run_rank(function: Callable[[], object], rank: int, world_size: int, port: int, file: Path) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    # Cells leave little garbage; looking for it as often as usual takes a tenth of their time.
    gc.set_threshold(50_000, 20, 100)
    # A forked child must not touch the thread pool that its parent started.
    torch.set_num_threads(1)
    distributed_c10d.ProcessGroupGloo = OneGlooDevice
    # With what native code says before it ends the process, which pytest would show with another test's output.
    stacks = _stacks_file(file).open("w")
    os.dup2(stacks.fileno(), 2)
    faulthandler.enable(file=stacks)
    try:
        runtime.init("cpu", timeout_s=120)
        result = function()
        runtime.shutdown()
    except BaseException:  # noqa: BLE001 - the test shows it
        result = Failure(f"rank {rank}:\n{traceback.format_exc()}")
    torch.save(result, file)
    os._exit(0)
