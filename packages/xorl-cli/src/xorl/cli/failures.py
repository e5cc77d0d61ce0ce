"""The files that ranks leave for the launcher when they fail or stop, and the report of a job's failures.

Error records have the format that torchrun reads (torch.distributed.elastic.multiprocessing.errors), with an
additional key `xorl` whose timestamp is precise enough to tell which rank failed first. They are written without
importing torch, because a rank may fail before it does.
"""

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xorl.cli.exit_codes import BY_SIGNAL, DIVERGED, ERROR_PREFIX, EXPLAINED, exit_code_text
from xorl.host.signals import STOP_SIGNALS

ERROR_FILE = "error.json"
INTERRUPTED_FILE = "interrupted"  # in the same folder
REPORTED_FILE = "reported"  # in the folder above it
MAX_OTHERS = 3  # later failures listed, with one line each
# No process of the job sends these signals, so a rank terminated by one failed first, before any rank with a record.
FATAL_SIGNALS = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
NANOSECONDS = 1_000_000_000


@dataclass(frozen=True)
class Failure:
    """A rank that did not exit with 0.

    `text` is the full message and `summary` one line of it. `was_stopped` marks a rank that was stopped by a signal.
    """

    rank: int
    code: int
    text: str
    summary: str
    time_ns: int
    was_stopped: bool = False


def record_error(file: Path, error: BaseException, *, text: str, code: int) -> None:
    """Writes the error of a rank to the file that the launcher reads."""
    now = time.time_ns()
    message = text if text.startswith(ERROR_PREFIX) else f"{type(error).__name__}: {error}"
    summary = message.splitlines()[0]
    record = {
        "message": {
            "message": summary,
            "extraInfo": {"py_callstack": text, "timestamp": str(now // NANOSECONDS)},
            "errorCode": code,
            "xorl": {"time_ns": now},
        }
    }
    _write(file, json.dumps(record))


def record_interruption(error_file: Path) -> None:
    """Tells the other ranks of this node that a signal stopped this one, so that they do not wait for it."""
    (error_file.parent / INTERRUPTED_FILE).touch()


def claim_report(error_file: Path) -> bool:
    """Whether this rank is the first of its node to fail, and therefore prints its error."""
    try:
        (error_file.parent.parent / REPORTED_FILE).open("x").close()
    except FileExistsError:
        return False
    return True


def peer_has_failed(error_file: Path | None) -> bool:
    """Whether another rank of this node has recorded an error or an interruption."""
    if error_file is None:
        return False
    # Launchers create sibling folders for the ranks.
    peers = (folder for folder in error_file.parent.parent.iterdir() if folder != error_file.parent)
    return any((folder / name).exists() for folder in peers for name in (ERROR_FILE, INTERRUPTED_FILE))


def record_pid(folder: Path, rank: int) -> None:
    """Tells the launcher that this rank handles signals from now on."""
    _write(folder / f"{rank}.pid", str(os.getpid()))


def record_stop(folder: Path, rank: int, code: int) -> None:
    """Tells the launcher that this rank stopped cleanly, and with which exit code."""
    _write(folder / f"{rank}.stop", str(code))


def recorded_pids(folder: Path) -> list[int]:
    """Returns the process ids of the ranks that handle signals."""
    return [int(file.read_text()) for file in sorted(folder.glob("*.pid"))]


def recorded_stop(folder: Path) -> int:
    """Returns the exit code of the ranks that stopped cleanly on a signal, or 0."""
    return max((int(file.read_text()) for file in folder.glob("*.stop")), default=0)


def failure_of(rank: int, exit_code: int, record: Mapping[str, object] | None, seen_s: int) -> Failure:
    """Creates a Failure from a rank's record, or from its exit code (negative for a signal) if there is no record."""
    message = record.get("message") if record else None
    code = BY_SIGNAL - exit_code if exit_code < 0 else exit_code
    if isinstance(message, dict) and "extraInfo" in message:
        extra = message["extraInfo"]
        fallback_ns = int(extra["timestamp"]) * NANOSECONDS
        time_ns = message.get("xorl", {}).get("time_ns", fallback_ns)
        return Failure(rank, message.get("errorCode") or code, extra["py_callstack"], message["message"], time_ns)
    text = f"{ERROR_PREFIX}{exit_code_text(code)}" if code == DIVERGED else f"{exit_code_text(code)}, without a message"
    if -exit_code == signal.SIGKILL:
        text = "ended by SIGKILL, which the system sends when memory runs out"
    # seen_s is truncated to a second. A fatal signal in the same second as a record must sort before the record, any
    # other exit code after it.
    time_ns = seen_s * NANOSECONDS - (NANOSECONDS if -exit_code in FATAL_SIGNALS else -NANOSECONDS)
    return Failure(rank, code, text, text, time_ns, was_stopped=code - BY_SIGNAL in STOP_SIGNALS)


def report(failures: Sequence[Failure], world_size: int) -> tuple[str, int]:
    """Returns the report of a job's failures, and the job's exit code, which is that of the first failure."""
    ordered = sorted(failures, key=lambda failure: (failure.was_stopped, failure.time_ns, failure.rank))
    first, others = ordered[0], [failure for failure in ordered[1:] if not failure.was_stopped]
    if first.was_stopped:
        return exit_code_text(first.code), first.code
    if first.code in EXPLAINED or first.text.startswith(ERROR_PREFIX):
        is_shared = any(other.text == first.text for other in others) or world_size == 1
        lines = [first.text if is_shared else f"{first.text}\n(rank {first.rank} of {world_size})"]
        is_user_error = first.code in EXPLAINED
        others = [o for o in others if o.text != first.text and not (is_user_error and o.code == first.code)]
    else:
        lines = [f"rank {first.rank} of {world_size} failed first, with exit code {first.code}:", "", first.text]
    later = [f"rank {other.rank} failed later: {other.summary}" for other in others[:MAX_OTHERS]]
    if len(others) > MAX_OTHERS:
        later.append(f"and {len(others) - MAX_OTHERS} more ranks")
    return "\n".join([*lines, "", *later] if later else lines), first.code


def _write(file: Path, text: str) -> None:
    temporary = file.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)
