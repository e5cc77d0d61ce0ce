"""The file in which the launcher reports to the orchestrator which processes it has restarted, and why."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from xorl.server.status_queries import ProcessStatus

RESTARTS_FILE = "restarts.json"


def write_restarts(file: Path, processes: Sequence[ProcessStatus]) -> None:
    """Replace the file's content. Raises OSError if that is not possible; the file is then as it was."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_bytes(msgspec.json.encode(processes))
        temporary.replace(file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_restarts(file: Path | None) -> list[ProcessStatus]:
    """The processes that the launcher watches; none if there is no launcher."""
    return [] if file is None else msgspec.json.decode(file.read_bytes(), type=list[ProcessStatus])
