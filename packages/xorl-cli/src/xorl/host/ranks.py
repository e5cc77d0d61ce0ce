"""Starts, watches and ends the ranks of a job on this host, without torch.

`xorl.core.launched` defines how the ranks find each other. Failures are reported elsewhere.
"""

from __future__ import annotations

import json
import logging
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

from xorl.host.processes import describe_state

logger = logging.getLogger(__name__)

POLL_S = 0.05
END_S = 30.0  # how long a rank that was told to end may still be saving, before it is killed
KILL_S = 10.0  # how long killed ranks take to end; one that waits for a lost disk or device does not end at all
RECORD_FILE = "error.json"


@dataclass(frozen=True)
class Nodes:
    """The hosts of a job, all with the same number of ranks, and the index of this host."""

    ranks_per_node: int
    num_nodes: int = 1
    node_rank: int = 0

    @property
    def world_size(self) -> int:
        return self.ranks_per_node * self.num_nodes


@dataclass(frozen=True)
class RankExit:
    """A rank that did not end with 0.

    `exit_code` is negative for a signal. `record` is the content of the rank's error file; None if it wrote none.
    `seen_s` is when its end was noticed.
    """

    rank: int
    exit_code: int
    record: Mapping[str, object] | None
    seen_s: int


class Ranks:
    """The processes of this host's ranks: `python -u *command`, each in a session of its own.

    They start when the context is entered. When it is left, ranks that still run are killed, with the processes they
    started.

    This class does not watch whether running ranks make progress: the ranks do so themselves (`xorl.train.watchdog`),
    and in the service also the launcher (`xorl.server.hangs`).

    Args:
        variables: additional environment variables for every rank, such as the location of the job's store.
        folder: receives a folder for each rank, with its error file. Only this user may enter it.
    """

    def __init__(self, command: Sequence[str], nodes: Nodes, variables: Mapping[str, str], folder: Path) -> None:
        self._command = [sys.executable, "-u", *command]
        self._nodes, self._variables, self._folder = nodes, variables, folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._exits: dict[int, RankExit] = {}
        self._left: set[int] = set()  # ranks that did not end even when they were killed
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

        Once one has failed, the others are ended. Once `stops` is not empty, all are ended with the signal in it; a
        signal handler may append to `stops` meanwhile.
        """
        while self._running() and not self._exits and not stops:
            time.sleep(POLL_S)
            self._look()
        if stops and not self._exits:
            self.stopped_by = stops[0]
        self.end(signal.Signals(self.stopped_by or signal.SIGTERM), stops)
        return list(self._exits.values())

    def end(self, number: signal.Signals, stops: Sequence[int] = ()) -> None:
        """Send a signal to the running ranks and the processes they started, and wait for them to end.

        Kills those that still run after END_S, or once `stops` has grown. Logs and leaves those that are not gone
        KILL_S later.
        """
        patience = len(stops)
        deadline = time.monotonic() + END_S
        self._signal(number)
        while self._running() and time.monotonic() < deadline and len(stops) <= patience:
            time.sleep(POLL_S)
        self._signal(signal.SIGKILL)
        deadline = time.monotonic() + KILL_S
        while self._running() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for rank, process in self._processes.items():
            if rank not in self._left and process.poll() is None:
                self._left.add(rank)
                logger.error(
                    "event=rank_left rank=%d pid=%d why='it was killed %g s ago and %s; its GPU and memory stay taken "
                    "until it ends'",
                    rank,
                    process.pid,
                    KILL_S,
                    describe_state(process.pid),
                )
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
            # From these, torch and other libraries recognise a rank whose launcher reads error files.
            "TORCHELASTIC_RUN_ID": "xorl",
            "TORCHELASTIC_ERROR_FILE": str(folder / RECORD_FILE),
            **self._variables,
        }
        if nodes.ranks_per_node > 1:
            environment.setdefault("OMP_NUM_THREADS", "1")  # so that ranks do not compete for cores
        environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as under torchrun
        self._processes[rank] = subprocess.Popen(self._command, env=environment, start_new_session=True)

    def _running(self) -> bool:
        return any(process.poll() is None for rank, process in self._processes.items() if rank not in self._left)

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
