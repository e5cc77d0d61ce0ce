"""Inspects processes of this host through /proc. Without /proc, as on macOS, no process seems to have children."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

STOPPED = "T"

_STATES = {
    STOPPED: "is stopped (state T): it got SIGSTOP or SIGTSTP, and only SIGCONT lets it go on",
    "t": "is held by a debugger (state t)",
    "D": "waits for a disk, a network file system or a device (state D)",
}


def state_of(pid: int) -> str | None:
    """The letter of a process's state, as in ps; None if the process has ended or its state is unknown."""
    fields = _fields(pid)
    return None if fields is None or fields[0] in "ZX" else fields[0]


def describe_state(pid: int) -> str:
    """Describes why a process may not answer, as a predicate: `is stopped (state T): ...`."""
    state = state_of(pid)
    if state is None:
        return "has ended"
    return _STATES.get(state, f"runs (state {state}) without answering, for example in native code that holds the GIL")


def descendants(pid: int) -> list[int]:
    """The children of a process, their children and so on, parents first."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _fields(int(entry.name))
        if fields is not None:
            children[int(fields[1])].append(int(entry.name))
    found = [pid]
    for parent in found:
        found += children[parent]
    return found[1:]


def kill_with_descendants(pid: int) -> None:
    """Send SIGKILL to a process and all of its descendants, including stopped ones."""
    for each in (pid, *descendants(pid)):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def kill_stopped_descendants() -> None:
    """Kill this process's stopped descendants, before it ends.

    Running descendants notice its end themselves.
    """
    for each in descendants(os.getpid()):
        if state_of(each) == STOPPED:
            kill_with_descendants(each)


def _fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat that follow the name: the state, the parent's id and so on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # it has ended or belongs to another user (hidepid), or there is no /proc
        return None
