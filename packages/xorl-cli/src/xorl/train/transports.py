"""Keeps the choice of `fsdp_collectives: auto` over restarts: what is recorded, and in which form.

Copy engines and NCCL sum gradients in different orders, so another choice would change every later step.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from xorl.ckpt.layout import JSON
from xorl.ckpt.ranks import all_gather_text, broadcast_text, fail_together, this_rank
from xorl.core.parallel.collectives import Transport, choices, keep_choices

logger = logging.getLogger(__name__)

# In a checkpoint's manifest.
FSDP_COLLECTIVES = "fsdp_collectives"


def all_choices() -> dict[str, Transport]:
    """The choices of `auto` on all ranks, by the ranks that communicate; empty if nothing was measured. Collective."""
    gathered: dict[str, Transport] = {}
    for text in all_gather_text(json.dumps(choices())):
        gathered |= json.loads(text)
    return gathered


def keep_choices_of(info: Mapping[str, JSON], source: Path) -> None:
    """Keep the choices that the manifest of a checkpoint records. Raises ValueError if they cannot be read."""
    _keep(info.get(FSDP_COLLECTIVES), source)


class ChoicesFile:
    """A file with the choices of a service, whose workers may start many times. Only rank 0 opens it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: object = None

    def keep(self) -> None:
        """Keep the choices of an earlier start, if there are any. Collective.

        Raises an error if the file cannot be read, since new measurements could change the sums.
        """
        text = "null"
        with fail_together(f"read {self._path}"):
            if this_rank() == 0 and self._path.exists():
                text = self._path.read_text(encoding="utf-8")
        try:
            self._kept = json.loads(broadcast_text(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"{self._path} is not JSON ({error}); remove the file to measure again") from error
        _keep(self._kept, self._path)

    def write(self) -> None:
        """Record the choices of this start, unless they are recorded already. Collective."""
        found = all_choices()
        if this_rank() != 0 or not found or found == self._kept:
            return
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(found), encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            logger.warning(
                "%s cannot be written (%s): workers that restart will measure again, and their sums may differ in the "
                "last bit; to avoid this, set fsdp_collectives",
                self._path,
                error.strerror,
            )


def _keep(saved: object, source: Path) -> None:
    if saved is None:
        return
    if not isinstance(saved, dict):
        raise ValueError(f"{source}: {FSDP_COLLECTIVES} is not an object")
    try:
        keep_choices(saved)
    except ValueError as error:
        raise ValueError(f"{source}: {FSDP_COLLECTIVES}: {error}") from error
