"""Saves in the background: one save at a time is copied to host memory, then written by a thread.

`Checkpointer.save` uses a writer if it is given one; the caller decides when to wait for it.
"""

import atexit
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

from xorl.ckpt.ranks import background_group, communicating_over, fail_together
from xorl.ckpt.regions import Stored
from xorl.ckpt.snapshot import HostMemory, Snapshot, reserve_for, take_snapshot

logger = logging.getLogger(__name__)

# The checkpoints of saves for which nobody has called `finish`.
_UNFINISHED: dict[Future[None], Path] = {}


class BackgroundWriter:
    """Writes one save at a time while training continues, over a process group of its own.

    Call `finish` before the process ends: it does not wait for a save, because other ranks may be gone and then it
    would wait for hours. What was not written is logged as a warning at exit, with the checkpoint's path.

    The host memory for the copies is kept from one save to the next until `close`. All ranks must call the collective
    methods in the same order as their other collectives.
    """

    def __init__(self) -> None:
        self._memory = HostMemory()
        self._snapshot: Snapshot | None = None
        self._writing: Future[None] | None = None

    def reserve(self, tensors: Mapping[str, Stored]) -> None:
        """Reserve memory for a copy of `tensors` before training, since page-locking takes seconds. Collective.

        Raises CheckpointFailure if there is not enough host memory.
        """
        with fail_together("reserve host memory"):
            reserve_for(tensors, self._memory)

    def start(self, tensors: Mapping[str, Stored], write: Callable[[dict[str, Stored]], object], path: Path) -> None:
        """Wait for the previous save, start to copy `tensors`, and pass the copies to `write` in a thread. Collective.

        `path` is the checkpoint, for messages. Call `before_change` before the tensors change. Raises the error of the
        previous save, if it failed, and CheckpointFailure if there is not enough host memory.
        """
        self.finish()
        with fail_together("copy the state to host memory"):
            snapshot = take_snapshot(tensors, self._memory)
        group, writing = background_group(), Future[None]()

        def run() -> None:
            try:
                snapshot.wait()
                with communicating_over(group):
                    write(snapshot.tensors)
                writing.set_result(None)
            except BaseException as error:  # noqa: BLE001  (`finish` raises it)
                writing.set_exception(error)

        self._snapshot, self._writing = snapshot, writing
        _UNFINISHED[writing] = path
        # A daemon, so that a second Ctrl-C ends the process without waiting for the disk.
        threading.Thread(target=run, name="save-checkpoint", daemon=True).start()

    @property
    def writing(self) -> Future[None] | None:
        """The save that is being written or has ended, until `finish` is called."""
        return self._writing

    @property
    def has_failed(self) -> bool:
        """Whether the save has failed; ranks learn of it at slightly different times."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def before_change(self) -> None:
        """Let the device finish copying before it executes what is queued from now on; the host does not wait.

        Without this call, the files may mix values from before and after the change. On the CPU it has nothing to do:
        the copies are complete when the save returns.
        """
        if self._snapshot is not None:
            self._snapshot.before_change()
            self._snapshot = None

    def finish(self) -> None:
        """Wait for the save that is being written, and raise its error. All ranks raise together."""
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result()
            finally:
                if writing.done():  # not if Ctrl-C ended the wait
                    _UNFINISHED.pop(writing, None)

    def close(self) -> None:
        """Return the host memory to the system; the last save must have ended."""
        self._snapshot = None
        self._memory.free()


@atexit.register
def _warn_of_lost_saves() -> None:
    for writing, path in _UNFINISHED.items():
        error = writing.exception() if writing.done() else "the process ended before it was written"
        if error is not None:
            logger.warning(
                "event=checkpoint_lost path=%s error=%s hint='call BackgroundWriter.finish before the process ends'",
                path,
                error,
            )
