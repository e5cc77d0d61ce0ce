"""What the ranks of a job leave behind for the launcher, and how it is told to the user: the first failure first.

Records have the form that torch's own launcher reads (torch.distributed.elastic.multiprocessing.errors), and under
`xorl` a time that is fine enough to tell which rank was first. They are written without importing torch, since a rank
may fail before that.
"""

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xorl.cli.exit_codes import BAD_INPUT, BY_SIGNAL, DIVERGED, INTERRUPTED, TERMINATED, TOLD, meaning_of

ERROR_FILE = "error.json"
INTERRUPTED_FILE = "interrupted"  # beside it
MAX_OTHERS = 3  # other failures shown, a line each
# A signal that no one in the job sends: whoever it hits fell first, whatever the others then say.
FATAL_SIGNALS = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
NANOSECONDS = 1_000_000_000


@dataclass(frozen=True)
class Failure:
    """A rank that did not end with 0.

    `text` is all there is to say, `summary` a line of it. `was_stopped` marks a rank that a signal asked to end.
    """

    rank: int
    code: int
    text: str
    summary: str
    time_ns: int
    was_stopped: bool = False


def write_record(file: Path, error: BaseException, *, text: str, code: int) -> None:
    """Writes what ended a rank where its launcher looks for it."""
    now = time.time_ns()
    told = text if text.startswith(TOLD) else f"{type(error).__name__}: {error}"
    summary = told.splitlines()[0]
    record = {
        "message": {
            "message": summary,
            "extraInfo": {"py_callstack": text, "timestamp": str(now // NANOSECONDS)},
            "errorCode": code,
            "xorl": {"time_ns": now},
        }
    }
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(record), encoding="utf-8")
    temporary.replace(file)


def note_interruption(error_file: Path) -> None:
    """Tells the other ranks of this node that a signal has ended this one, so that waiting for it is in vain."""
    (error_file.parent / INTERRUPTED_FILE).touch()


def peer_has_failed(error_file: Path | None) -> bool:
    """Says whether another rank of this node has recorded an error, or that a signal has ended it."""
    if error_file is None:
        return False
    # torch gives each rank a folder beside the others.
    peers = (folder for folder in error_file.parent.parent.iterdir() if folder != error_file.parent)
    return any((folder / name).exists() for folder in peers for name in (ERROR_FILE, INTERRUPTED_FILE))


def note_pid(folder: Path, rank: int) -> None:
    """Tells the launcher that this rank takes signals from now on."""
    _write(folder / f"{rank}.pid", str(os.getpid()))


def note_stop(folder: Path, rank: int, code: int) -> None:
    """Tells the launcher that this rank stopped in good order, and the exit code of that."""
    _write(folder / f"{rank}.stop", str(code))


def noted_pids(folder: Path) -> list[int]:
    """Returns the processes of the ranks that take signals."""
    return [int(file.read_text()) for file in sorted(folder.glob("*.pid"))]


def noted_stop(folder: Path) -> int:
    """Returns the exit code with which ranks stopped in good order, or 0."""
    return max((int(file.read_text()) for file in folder.glob("*.stop")), default=0)


def failure_of(rank: int, exit_code: int, record: Mapping[str, object] | None, seen_s: int) -> Failure:
    """Makes a Failure of a rank's record, or of its exit code (negative for a signal) where it left none."""
    message = record.get("message") if record else None
    if isinstance(message, dict) and "extraInfo" in message:
        extra = message["extraInfo"]
        fallback_ns = int(extra["timestamp"]) * NANOSECONDS
        time_ns = message.get("xorl", {}).get("time_ns", fallback_ns)
        code = message.get("errorCode") or _positive(exit_code)
        return Failure(rank, code, extra["py_callstack"], message["message"], time_ns)
    code = _positive(exit_code)
    text = f"{TOLD}{meaning_of(code)}" if code == DIVERGED else f"{meaning_of(code)}, and left no message"
    if -exit_code == signal.SIGKILL:
        text = "ended by SIGKILL; the system does that to a process when memory runs out"
    # A whole second was cut to get here: a fatal signal seen in the second of a record came before it.
    time_ns = seen_s * NANOSECONDS - (NANOSECONDS if -exit_code in FATAL_SIGNALS else -NANOSECONDS)
    return Failure(rank, code, text, text, time_ns, was_stopped=code in (INTERRUPTED, TERMINATED))


def report(failures: Sequence[Failure], world_size: int) -> tuple[str, int]:
    """Returns what is told of a job's failures, and the job's exit code, which is that of the first."""
    ordered = sorted(failures, key=lambda failure: (failure.was_stopped, failure.time_ns, failure.rank))
    first, others = ordered[0], [failure for failure in ordered[1:] if not failure.was_stopped]
    if first.was_stopped:
        return f"{meaning_of(first.code)}", first.code
    if first.code in (BAD_INPUT, DIVERGED) or first.text.startswith(TOLD):
        is_shared = any(other.text == first.text for other in others) or world_size == 1
        lines = [first.text if is_shared else f"{first.text}\n(rank {first.rank} of {world_size})"]
        is_user_error = first.code in (BAD_INPUT, DIVERGED)
        others = [o for o in others if o.text != first.text and not (is_user_error and o.code == first.code)]
    else:
        lines = [f"rank {first.rank} of {world_size} failed first, with exit code {first.code}:", "", first.text]
    told = [f"rank {other.rank} failed after it: {other.summary}" for other in others[:MAX_OTHERS]]
    if len(others) > MAX_OTHERS:
        told.append(f"and {len(others) - MAX_OTHERS} more ranks")
    return "\n".join([*lines, "", *told] if told else lines), first.code


def _positive(exit_code: int) -> int:
    return BY_SIGNAL - exit_code if exit_code < 0 else exit_code


def _write(file: Path, text: str) -> None:
    temporary = file.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.rename(file)
