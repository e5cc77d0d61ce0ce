"""Watches all ranks of a job from a thread in each rank: ends the job if it hangs, or if a host or rank is lost.

Each rank publishes its position, with the number of collectives that it has begun and the amount of data that it has
read and written, in the job's store. Rank 0 compares them. This works while the main thread waits in a collective or
for a GPU, and does not rely on the timeouts of NCCL or gloo, which name no rank and are set to act later.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from xorl.core.join import FAILED, Peers, WatchStore
from xorl.core.torch_private import num_collectives, process_groups
from xorl.host.alive import AwakeClock
from xorl.host.failures import LostRankError, StalledError
from xorl.host.processes import STOPPED, descendants, describe_state, state_of

# Longer than any phase without progress takes: the compilation of a model, or the save of a large one.
STALL_S = 1200.0
# For operations of process groups. They must not end the ranks before the watchdog has collected their stacks.
COLLECTIVE_TIMEOUT = timedelta(seconds=2 * STALL_S)
# Without a sign of life. Native code may keep other threads from running for some time.
LOST_S = 120.0
INTERVAL_S = 2.0
# After a failure elsewhere: until the launcher has stopped the ranks of the same host, or their own errors are known.
GRACE_S = 5.0
# How long to wait for a store operation that is under way when the watch ends; if its host is lost, it never returns.
STOP_S = 10.0
# The longest round of the watch, with slow store operations. If one takes longer, this process was stopped.
MAX_ROUND_S = 15.0
ADVICE = "Run the same command again on all hosts; it continues from the newest checkpoint"
_STACKS_WANTED = "xorl/stacks"


@dataclass
class Position:
    """Where this rank is: its phase and, in training, its step.

    `moves` counts all changes; long phases also call `move` as they advance.
    """

    phase: str = "start"
    step: int | None = 0
    moves: int = 0

    def move(self, phase: str | None = None, step: int | None = None) -> None:
        self.phase = phase or self.phase
        self.step = self.step if step is None else step
        self.moves += 1


@dataclass(frozen=True)
class Report:
    """The state that a rank publishes.

    beat: increases with each report. collectives: the number that the rank has begun. file_mib: MiB read and written.
    """

    beat: int
    phase: str
    step: int | None
    moves: int
    collectives: int
    file_mib: int = 0
    pid: int = 0

    def __str__(self) -> str:
        return self.phase if self.step is None else f"step {self.step}, {self.phase}"

    @property
    def progress(self) -> tuple[int, ...]:
        """Changes whenever the rank advances."""
        return self.moves, self.collectives, self.file_mib


class Watchdog:
    """Calls `end` with StalledError or LostRankError from a thread; `end` must end the process.

    Args:
        end: does not return.
        stall_s: how long no rank may make progress.
        lost_s: how long a rank may give no sign of life.
        position: this rank's position; the caller moves it.
        advice: what the user can do about a rank that was lost.
    """

    def __init__(
        self,
        end: Callable[[Exception], object],
        *,
        stall_s: float = STALL_S,
        lost_s: float = LOST_S,
        interval_s: float = INTERVAL_S,
        position: Position | None = None,
        advice: str = ADVICE,
    ) -> None:
        self.position = position or Position()
        self._advice = advice
        self._end = end
        self._stall_s, self._lost_s, self._interval_s = stall_s, lost_s, interval_s
        self._stopped = threading.Event()
        self._peers: Peers | None = None
        self._store: WatchStore | None = None
        self._rank = 0
        self._num_rounds = 0
        # With short limits, a gap of MAX_ROUND_S would exceed them.
        self._max_round_s = min(MAX_ROUND_S, stall_s / 3, lost_s / 3)
        self._view = _View(1, self._max_round_s)
        self._threads: list[threading.Thread] = []

    def start(self, peers: Peers | None, rank: int) -> None:
        """Begin to watch. `peers` is None for a process without others."""
        timeout = timedelta(seconds=max(10.0, self._interval_s))
        self._store = dist.HashStore() if peers is None else peers.watch_store(timeout)
        self._peers, self._rank = peers, rank
        self._view = _View(self._num_ranks, self._max_round_s)
        targets = (self._watch, self._watch_store)
        self._threads = [threading.Thread(target=each, name="xorl-watchdog", daemon=True) for each in targets]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop watching, after the last collective: until then the others expect signs of life."""
        self._stopped.set()
        for thread in self._threads:
            # If a thread is inside a store operation when the interpreter exits, the process aborts.
            if thread is not threading.current_thread():
                thread.join(STOP_S)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Watch until the block ends. Tell other hosts what it raises; a lost connection becomes a LostRankError."""
        try:
            yield
        except BaseException as error:
            if self._peers is None:
                raise
            if (lost := _lost_address(error)) is not None:
                raise self._cause(lost, str(error).splitlines()[0]) from error
            if self._peers.num_hosts > 1:
                kind = "" if type(error).__module__.startswith("xorl.") else f"{type(error).__name__}: "
                text = kind + (str(error).splitlines() or [type(error).__name__])[0]
                location = str(self._peers.locations[self._rank])
                self._fail(text if text.startswith(location) else f"{location} ended: {text}", LostRankError)
            raise
        finally:
            self.stop()

    def _cause(self, address: str, text: str) -> Exception:
        """Why a connection to `address` was lost: what another rank has published, if it had time to."""
        assert self._peers is not None
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            if (failure := self._failure()) is not None:
                return failure
            time.sleep(0.1)
        locations = ", ".join(map(str, self._peers.at(address))) or f"another rank {address}".rstrip()
        return LostRankError(
            f"the connection to {locations} was lost: that host, its network or one of these processes ended. Look at "
            "its output, then run the same command again on all hosts; it continues from the newest checkpoint "
            f"({text})"
        )

    @property
    def _num_ranks(self) -> int:
        return 1 if self._peers is None else len(self._peers.locations)

    def _name(self, rank: int) -> str:
        return "rank 0" if self._peers is None else str(self._peers.locations[rank])

    def _fail(self, text: str, kind: type[Exception]) -> None:
        """Publish the end of the job, unless another rank has: the first one counts."""
        assert self._store is not None
        try:
            self._store.compare_set(FAILED, "", json.dumps([kind.__name__, text]))
        except RuntimeError:  # the store is gone, and with it everyone who would read this
            return

    def _failure(self) -> Exception | None:
        """Why the job ends, if a rank or a launcher has published it, or if the store is gone."""
        assert self._store is not None
        try:
            if not self._store.check([FAILED]):
                return None
            kind, text = json.loads(self._store.get(FAILED))
        except RuntimeError:
            return self._lost_store()
        return (StalledError if kind == StalledError.__name__ else LostRankError)(text)

    def _watch(self) -> None:
        assert self._store is not None
        while not self._stopped.wait(self._interval_s):
            self._num_rounds += 1
            try:
                self._publish(self._num_rounds)
                if self._rank == 0 or self._num_rounds > 1:
                    self._check()
            except RuntimeError:
                # Only operations of the store raise it. Its host may be lost; _failure asks again.
                pass
            if (failure := self._failure()) is None:
                continue
            if not isinstance(failure, StalledError) and self._stopped.wait(GRACE_S):
                return
            if self._rank == 0:
                time.sleep(self._interval_s + 1)  # the others read it from the store, which may end with this host
            self._end(failure)
            return

    def _watch_store(self) -> None:
        """End this rank if the store does not answer: operations on a host that vanished may never return."""
        clock, round_s, num_rounds = AwakeClock(self._max_round_s), 0.0, 0
        # In a stall, ranks end a few rounds later, once the stacks have been collected.
        limit_s = self._lost_s + GRACE_S + 10 * self._interval_s
        while not self._stopped.wait(self._interval_s):
            now = clock.now()
            if num_rounds != self._num_rounds:
                round_s, num_rounds = now, self._num_rounds
            elif now - round_s > limit_s:
                self._end(self._lost_store())
                return

    def _lost_store(self) -> LostRankError:
        first = self._view.reports.get(0)
        is_stopped = first is not None and self._shares_host(0) and state_of(first.pid) == STOPPED
        why = f". {self._describe_silence(0, first)}" if is_stopped else ""
        return LostRankError(f"{self._name(0)} was lost: the job's store, on its host, does not answer{why}")

    def _publish(self, beat: int) -> None:
        assert self._store is not None
        at = self.position
        report = Report(beat, at.phase, at.step, at.moves, _num_collectives(), _file_mib(), os.getpid())
        self._store.set(f"xorl/at/{self._rank}", json.dumps(astuple(report)))
        if self._store.check([_STACKS_WANTED]):
            self._store.set(f"xorl/stack/{self._rank}", _main_stack())

    def _check(self) -> None:
        """Look for lost ranks and, on rank 0, for a stall. Other ranks only watch rank 0."""
        assert self._store is not None
        view = self._view
        watched = range(self._num_ranks) if self._rank == 0 else [0]
        present = [rank for rank in watched if rank in view.reports or self._store.check([f"xorl/at/{rank}"])]
        texts = self._store.multi_get([f"xorl/at/{rank}" for rank in present])
        view.update({rank: Report(*json.loads(text)) for rank, text in zip(present, texts, strict=True)})
        if silent := [rank for rank in watched if view.now_s - view.heard_s[rank] > self._lost_s]:
            names = ", ".join(self._name(rank) for rank in silent)
            last = view.reports.get(silent[0])
            self._fail(
                f"{names}: no sign of life for {self._lost_s:g} s, last at {last or 'the start'}. "
                f"{self._describe_silence(silent[0], last)}. {self._advice}".rstrip(". "),
                LostRankError,
            )
        elif self._rank == 0 and view.now_s - view.moved_s > self._stall_s:
            self._fail(self._describe_stall(view.reports), StalledError)

    def _describe_silence(self, rank: int, last: Report | None) -> str:
        """Why a rank may be silent: the state of its process, if it is on this host."""
        if last is not None and self._shares_host(rank):
            return f"Its process {last.pid} {describe_state(last.pid)}"
        return "Its host was lost, or its process is stopped or kept from answering by native code"

    def _shares_host(self, rank: int) -> bool:
        assert self._peers is not None
        return self._peers.locations[rank].network == self._peers.locations[self._rank].network

    def _describe_stall(self, reports: Mapping[int, Report]) -> str:
        assert self._store is not None
        self._store.set(_STACKS_WANTED, "1")
        self._store.set("xorl/stack/0", _main_stack())
        deadline = time.monotonic() + 5 * self._interval_s
        stacks: dict[int, str] = {}
        while len(stacks) < self._num_ranks and time.monotonic() < deadline:
            for rank in reports.keys() - stacks.keys():
                if self._store.check([f"xorl/stack/{rank}"]):
                    stacks[rank] = self._store.get(f"xorl/stack/{rank}").decode()
            time.sleep(0.1)
        culprits = awaited(reports, answered=stacks.keys())
        lines = [f"no rank has made progress for {self._stall_s:g} s"]
        if culprits:
            lines.append(f"the others wait for {', '.join(f'{self._name(rank)}' for rank in culprits[:8])}")
        elif len(reports) > 1:
            lines.append("all ranks wait at the same place, probably for the network or a GPU")
        lines += [f"{self._name(rank)}: {reports[rank]}" for rank in (culprits or sorted(reports))[:8]]
        return "\n".join([*lines, "", *_grouped(stacks)])


class _View:
    """The newest reports, and when they changed by this process's clock."""

    def __init__(self, num_ranks: int, max_round_s: float) -> None:
        self.reports: dict[int, Report] = {}
        self._clock = AwakeClock(max_round_s)
        self.now_s = self.moved_s = 0.0
        self.heard_s = [0.0] * num_ranks

    def update(self, reports: Mapping[int, Report]) -> None:
        self.now_s = self._clock.now()
        for rank, report in reports.items():
            previous = self.reports.get(rank)
            if previous is None or previous.beat != report.beat:
                self.heard_s[rank] = self.now_s
            if previous is None or previous.progress != report.progress:
                self.moved_s = self.now_s
        self.reports = dict(reports)


def awaited(reports: Mapping[int, Report], answered: Collection[int]) -> list[int]:
    """The ranks that the others wait for: those that do not answer, else those that have begun the fewest collectives,
    else those that have moved least. Empty if all ranks are equal.
    """
    silent = sorted(rank for rank in reports if rank not in answered)
    if silent:
        return silent
    for count in (lambda report: report.collectives, lambda report: report.moves):
        fewest = min(map(count, reports.values()))
        behind = sorted(rank for rank, report in reports.items() if count(report) == fewest)
        if len(behind) < len(reports):
            return behind
    return []


def _num_collectives() -> int:
    """The number of collectives that this rank has begun in all its process groups."""
    if not dist.is_initialized():
        return 0
    return sum(map(num_collectives, process_groups()))


def _file_mib() -> int:
    """MiB that this process has read and written, if the system tells; in coarse steps, so that logs do not count."""
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return 0
    # Reads of memory-mapped files are only counted in `read_bytes`.
    return sum(int(fields[name]) for name in ("rchar", "wchar", "read_bytes")) >> 20


def _main_stack() -> str:
    """The stack of this process's main thread, and its stopped child processes."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = "".join(traceback.format_stack(frame)).rstrip() if frame else "no Python frame"
    stopped = [child for child in descendants(os.getpid()) if state_of(child) == STOPPED]
    return "\n".join([stack, *(f"child process {child} {describe_state(child)}" for child in stopped)])


def _grouped(stacks: Mapping[int, str]) -> list[str]:
    """The stacks of all ranks, each once."""
    ranks: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        ranks.setdefault(stack, []).append(rank)
    return [f"rank{'s' * (len(found) > 1)} {', '.join(map(str, found))}:\n{stack}" for stack, found in ranks.items()]


def _lost_address(error: BaseException) -> str | None:
    """The address of the peer if this is the error of a connection that was lost, "" if it is unknown."""
    if not isinstance(error, RuntimeError) or type(error).__module__.startswith("xorl."):
        return None
    text = str(error)
    is_of_store = isinstance(error, (dist.DistNetworkError, dist.DistStoreError))
    if not is_of_store and "gloo" not in text and "ncclRemoteError" not in text:
        return None
    found = re.search(r"\[([0-9a-fA-F.:]+)\]:\d+", text)
    return found.group(1).removeprefix("::ffff:") if found else ""
