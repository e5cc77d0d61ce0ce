"""Starts, watches and ends the ranks of a job on this host, without torch.

How the ranks find each other is not decided here, see `xorl.core.launched`; nor what is said about a failure.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

POLL_S = 0.05
END_S = 30.0  # until a rank that was told to end is killed; it may still be saving
RECORD_FILE = "error.json"


@dataclass(frozen=True)
class Nodes:
    """The hosts of a job, all with the same number of ranks, and which of them this one is."""

    ranks_per_node: int
    num_nodes: int = 1
    node_rank: int = 0

    @property
    def world_size(self) -> int:
        return self.ranks_per_node * self.num_nodes


@dataclass(frozen=True)
class RankExit:
    """A rank that did not end with 0.

    `exit_code` is negative for a signal. `record` is what the rank wrote to its error file, None if nothing. `seen_s`
    is when its end was noticed.
    """

    rank: int
    exit_code: int
    record: Mapping[str, object] | None
    seen_s: int


class Ranks:
    """The processes of this host's ranks: `python -u *command`, each in a session of its own.

    They start on entering. On leaving, what still runs is killed, with the processes that it has started.

    Whether running ranks make progress is watched elsewhere: by the ranks themselves (`xorl.train.watchdog`), and in
    the service also by its launcher (`xorl.server.hangs`).

    Args:
        variables: further environment variables of every rank, such as where the job's store is.
        folder: gets a folder for each rank, with its error file. Only this user may enter it.
    """

    def __init__(self, command: Sequence[str], nodes: Nodes, variables: Mapping[str, str], folder: Path) -> None:
        self._command = [sys.executable, "-u", *command]
        self._nodes, self._variables, self._folder = nodes, variables, folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._exits: dict[int, RankExit] = {}
        self.stopped_by = 0  # the signal with which `wait` ended the ranks, before any had failed

    def __enter__(self) -> Self:
        try:
            for local_rank in range(self._nodes.ranks_per_node):
                self._start(local_rank)
        except BaseException:
            self.end(signal.SIGKILL)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.end(signal.SIGKILL)

    def wait(self, stops: Sequence[int]) -> list[RankExit]:
        """Wait until all ranks have ended; returns those that did not end with 0, in the order of their ends.

        Once one has failed, the others are ended. So are all once `stops` is not empty, with the signal in it: a
        handler may append to it meanwhile.
        """
        while self._running() and not self._exits and not stops:
            time.sleep(POLL_S)
            self._look()
        if stops and not self._exits:
            self.stopped_by = stops[0]
        self.end(signal.Signals(self.stopped_by or signal.SIGTERM), stops)
        return list(self._exits.values())

    def end(self, number: signal.Signals, stops: Sequence[int] = ()) -> None:
        """Send a signal to the ranks that run, with the processes they started, and wait for them to end.

        Kills what still runs after END_S, or once `stops` has grown.
        """
        patience = len(stops)
        deadline = time.monotonic() + END_S
        self._signal(number)
        while self._running() and time.monotonic() < deadline and len(stops) <= patience:
            time.sleep(POLL_S)
        self._signal(signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        self._look()

    def _start(self, local_rank: int) -> None:
        nodes = self._nodes
        rank = nodes.node_rank * nodes.ranks_per_node + local_rank
        folder = self._folder / str(rank)
        folder.mkdir()
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(nodes.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(nodes.ranks_per_node),
            "GROUP_RANK": str(nodes.node_rank),
            # With these, torch and others know a rank of a launcher that reads error files.
            "TORCHELASTIC_RUN_ID": "xorl",
            "TORCHELASTIC_ERROR_FILE": str(folder / RECORD_FILE),
            **self._variables,
        }
        if nodes.ranks_per_node > 1:
            environment.setdefault("OMP_NUM_THREADS", "1")  # so that ranks do not compete for cores
        environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as under torchrun
        self._processes[rank] = subprocess.Popen(self._command, env=environment, start_new_session=True)

    def _running(self) -> bool:
        return any(process.poll() is None for process in self._processes.values())

    def _look(self) -> None:
        """Note the ranks that have failed since the last look."""
        for rank, process in self._processes.items():
            if rank not in self._exits and process.poll():
                self._exits[rank] = RankExit(rank, process.returncode, self._record(rank), int(time.time()))

    def _record(self, rank: int) -> Mapping[str, object] | None:
        try:
            record = json.loads((self._folder / str(rank) / RECORD_FILE).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return record if isinstance(record, dict) else None

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                    os.killpg(process.pid, signal.SIGCONT)  # a stopped process gets no other signal but SIGKILL
