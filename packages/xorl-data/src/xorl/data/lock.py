"""A lock file with a heartbeat, one process at a time, for every file system; a dead holder is replaced.

It uses no kernel lock: network file systems may not have them, or may keep them long after a node is gone.
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

BEAT_S = 5.0
# Network file systems may show a heartbeat up to a minute late.
STALE_S = 120.0
REPORT_EVERY_S = 30.0
_POLL_S = 0.2
# Every heartbeat rewrites the record in place: with a fixed size, others always read a complete one.
_RECORD_BYTES = 1024


@contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Holds the lock file `path`; while waiting, logs who holds it. `what` is its name in the log.

    A holder that died on this machine is replaced at once, one on another machine when its heartbeat has not changed
    for STALE_S. A holder that was only suspended may then not be alone: work under the lock must be published by a
    rename, which fails for the second process. Raises DataFailure if the file cannot be created.
    """
    held = _acquire(path, what)
    try:
        yield
    finally:
        held.release()


def forget_dead(path: Path) -> None:
    """Removes the lock file `path` if its holder died on this machine after publishing but before releasing it."""
    record = _read(path)
    if record and _has_died(record):
        _remove(path, record)


class _Held:
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
        while not self._stop.wait(BEAT_S):
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


def _acquire(path: Path, what: str) -> _Held:
    started = time.monotonic()
    reported: float | None = None
    seen, seen_at = b"", started
    while True:
        held = _try(path)
        if held is not None:
            return held
        now = time.monotonic()
        record = _read(path)
        if record != seen:
            seen, seen_at = record, now
        if record and (_has_died(record) or now - seen_at > STALE_S):
            logger.warning("%s phase=takeover of=%s", what, _holder(record))
            _remove(path, record)
            continue
        if reported is None or now - reported > REPORT_EVERY_S:
            reported = now
            logger.info("%s phase=wait holder=%s waited_s=%.0f", what, _holder(record), now - started)
        time.sleep(_POLL_S)


def _try(path: Path) -> _Held | None:
    """Takes the lock if it is free: publishes the complete record by a hard link, which fails if one exists."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(6)}")
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.pwrite(descriptor, _record(0), 0)
            os.fsync(descriptor)
            os.link(temporary, path)
        except (FileExistsError, FileNotFoundError):
            # Held by another process, which may even have removed this file.
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DataFailure(f"{path} cannot be made: {error}") from error
    for leftover in path.parent.glob(f"{path.name}.*"):
        leftover.unlink(missing_ok=True)  # of processes that died while trying
    return _Held(path, descriptor)


def _remove(path: Path, record: bytes) -> None:
    """Removes a dead holder's file, unless another process was faster."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(6)}")
    with suppress(OSError):
        path.rename(aside)
        if _read(aside) != record:
            with suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def _record(beats: int) -> bytes:
    pid = os.getpid()
    values = {"pid": pid, "host": socket.gethostname(), "machine": _machine(), "born": _born(pid), "beats": beats}
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
    """Whether the holder ran on this machine, in this process namespace, and is gone."""
    values = _values(record)
    pid, machine = values.get("pid"), _machine()
    return machine is not None and values.get("machine") == machine and values.get("born") != _born(pid)


def _machine() -> str | None:
    """Identifies this boot of this machine and its process id namespace; None if they cannot be read."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _born(pid: object) -> str | None:
    """The start time of a process in kernel ticks, since process ids are reused; None if there is no such process."""
    with suppress(OSError, IndexError):
        # The name, in parentheses, may contain anything; the state is the first field after it, the start time the
        # 20th.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    return None
