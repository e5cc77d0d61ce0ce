"""Saves in the background: one save at a time is copied to host memory, then written by a thread.

`Checkpointer.save` uses a writer if it is given one; the caller decides when to wait for it.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from xorl.ckpt.ranks import background_group, communicating_over, fail_together
from xorl.ckpt.regions import Stored
from xorl.ckpt.snapshot import HostMemory, Snapshot, reserve_for, take_snapshot


class BackgroundWriter:
    """Writes one save at a time while training continues, over a process group of its own.

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

    def start(self, tensors: Mapping[str, Stored], write: Callable[[dict[str, Stored]], object]) -> None:
        """Wait for the previous save, start to copy `tensors`, and pass the copies to `write` in a thread. Collective.

        Call `before_change` before the tensors change. Raises the error of the previous save, if it failed, and
        CheckpointFailure if there is not enough host memory.
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
        """Let the device finish copying before it executes what is queued from now on; the host does not wait."""
        if self._snapshot is not None:
            self._snapshot.before_change()
            self._snapshot = None

    def finish(self) -> None:
        """Wait for the save that is being written, and raise its error. All ranks raise together."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Return the host memory to the system; the last save must have ended."""
        self._snapshot = None
        self._memory.free()
