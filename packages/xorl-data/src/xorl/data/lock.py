"""A lock file with a heartbeat that works on every file system and replaces a dead holder.

It uses no kernel locks: network file systems may not support them, or keep them long after a node is gone. It also
does not use the package filelock, whose SoftFileLease (4.2) takes over a stale lock only by an atomic exchange of two
file names, which NFS and many other network file systems refuse, so that waiting for a dead node would never end.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from xorl.data.errors import DataFailure

logger = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
# On network file systems a heartbeat may become visible up to a minute late.
STALE_S = 120.0
REPORT_EVERY_S = 30.0
_POLL_S = 0.2
# Each heartbeat overwrites the record in place; the fixed size ensures that others always read a complete record.
_RECORD_BYTES = 1024


@contextmanager
def exclusive(path: Path, label: str) -> Iterator[None]:
    """Holds the lock file `path`; logs the current holder while waiting. `label` names the lock in the log.

    A holder that died on this machine is replaced at once, a holder on another machine after STALE_S without a
    heartbeat. A holder that was only suspended may then run beside its replacement, so work under the lock must be
    published by a rename, which fails for the second process. Raises DataFailure if the file cannot be created.
    """
    held = _acquire(path, label)
    try:
        yield
    finally:
        held.release()


def remove_if_dead(path: Path) -> None:
    """Removes the lock file `path` if its holder died on this machine, for example after it published its result."""
    record = _read(path)
    if record and _has_died(record):
        _remove(path, record)


class _HeldLock:
    """A lock file held by this process, with its heartbeat."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._inode = os.fstat(descriptor).st_ino
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        beats = 0
        while not self._stop.wait(HEARTBEAT_S):
            beats += 1
            with suppress(OSError):  # the next write reports a full disk
                os.pwrite(self._descriptor, _record(beats), 0)
                os.fsync(self._descriptor)

    def release(self) -> None:
        self._stop.set()
        self._thread.join()
        with suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
        os.close(self._descriptor)


def _acquire(path: Path, label: str) -> _HeldLock:
    started = time.monotonic()
    reported: float | None = None
    seen, seen_at = b"", started
    while True:
        held = _try_acquire(path)
        if held is not None:
            return held
        now = time.monotonic()
        record = _read(path)
        if record != seen:
            seen, seen_at = record, now
        if record and (_has_died(record) or now - seen_at > STALE_S):
            logger.warning("%s phase=takeover of=%s", label, _holder(record))
            _remove(path, record)
            continue
        if reported is None or now - reported > REPORT_EVERY_S:
            reported = now
            logger.info("%s phase=wait holder=%s waited_s=%.0f", label, _holder(record), now - started)
        time.sleep(_POLL_S)


def _try_acquire(path: Path) -> _HeldLock | None:
    """Takes the lock if it is free: hard-links the complete record to `path`, which fails if `path` exists."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(6)}")
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.pwrite(descriptor, _record(0), 0)
            os.fsync(descriptor)
            os.link(temporary, path)
        except (FileExistsError, FileNotFoundError):
            # Another process holds the lock; it may also have deleted our temporary file.
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DataFailure(f"the lock file {path} cannot be created: {error}") from error
    for leftover in path.parent.glob(f"{path.name}.*"):
        leftover.unlink(missing_ok=True)  # from processes that died in this function
    return _HeldLock(path, descriptor)


def _remove(path: Path, record: bytes) -> None:
    """Removes a dead holder's file, unless another process has already replaced it."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(6)}")
    with suppress(OSError):
        path.rename(aside)
        if _read(aside) != record:
            with suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def _record(beats: int) -> bytes:
    pid = os.getpid()
    values = {
        "pid": pid,
        "host": socket.gethostname(),
        "machine": _machine_id(),
        "born": _start_time(pid),
        "beats": beats,
    }
    return json.dumps({**values, "at": time.ctime()}).encode().ljust(_RECORD_BYTES)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _values(record: bytes) -> dict[str, object]:
    with suppress(ValueError):
        values = json.loads(record)
        if isinstance(values, dict):
            return values
    return {}


def _holder(record: bytes) -> str:
    values = _values(record)
    return f"pid {values['pid']} on {values['host']}" if {"pid", "host"} <= set(values) else "another process"


def _has_died(record: bytes) -> bool:
    """Whether the holder ran on this machine, in this pid namespace, and has exited."""
    values = _values(record)
    pid, machine = values.get("pid"), _machine_id()
    return machine is not None and values.get("machine") == machine and values.get("born") != _start_time(pid)


def _machine_id() -> str | None:
    """Identifies the current boot of this machine and the pid namespace; None if they cannot be read."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _start_time(pid: object) -> str | None:
    """The start time of a process in clock ticks, because pids are reused; None if the process does not run."""
    with suppress(OSError, IndexError):
        # The process name, in parentheses, may contain any character. The state is the first field after it, the start
        # time the 20th.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    return None
