"""Receiver: the state of one inference server during one sync, on the sending rank."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from xorl.train.sync.buckets import Bucket
from xorl.train.sync.group import Rendezvous, SyncBackend, UpdateGroup
from xorl.train.sync.sglang import PauseMode, ReceiverError, SglangServer

logger = logging.getLogger(__name__)

# How long to wait for the server's own error message after another operation has failed.
_ERROR_GRACE_S = 1.0


@dataclass(frozen=True)
class ReceiverAddress:
    """The HTTP address of an inference server, and the number of its ranks."""

    host: str
    port: int
    world_size: int = 1


@dataclass(frozen=True)
class Timeouts:
    """Time limits of a receiver, in seconds, after which it counts as failed.

    connect_s: to accept a connection. group_s: to join the group. bucket_s: to receive one bucket. control_s: to pause,
    resume or leave a group. flush_s: until a flush of the cache succeeds.
    """

    connect_s: float = 5.0
    group_s: float = 120.0
    bucket_s: float = 120.0
    control_s: float = 30.0
    flush_s: float = 10.0


class Receiver:
    """The operations on one receiver; call them in the order of definition. A failing receiver raises no exception.

    Attributes:
        weights: old, new or mixed; a receiver with mixed weights is never resumed.
        failure: the first failure; after it, nothing more is sent. None if everything succeeded.
    """

    def __init__(self, address: ReceiverAddress, timeouts: Timeouts, *, group_name: str) -> None:
        self.address = address
        self.weights: Literal["old", "new", "mixed"] = "old"
        self.failure: str | None = None
        self._timeouts = timeouts
        self._group_name = group_name
        self._server = SglangServer(address.host, address.port, connect_timeout_s=timeouts.connect_s)
        self._group: UpdateGroup | None = None
        self._join_requested = False
        self._pause_requested = False
        self._in_flight: list[Future[None]] = []

    @property
    def is_healthy(self) -> bool:
        return self.failure is None

    def connect(self, rendezvous: Rendezvous, backend: SyncBackend, device: torch.device) -> None:
        self._join_requested = True
        num_receivers = self.address.world_size

        def join() -> None:
            self._server.join_group(
                self._group_name,
                address=rendezvous.address,
                port=rendezvous.port,
                world_size=num_receivers + 1,
                backend=backend,
                timeout_s=self._timeouts.group_s,
            )

        def build() -> None:
            self._group = UpdateGroup(
                rendezvous,
                self._group_name,
                num_receivers=num_receivers,
                backend=backend,
                device=device,
                timeout_s=self._timeouts.bucket_s,
            )

        self._wait([run_in_thread(join), run_in_thread(build)], self._timeouts.group_s, "joining the group")

    def pause(self, mode: PauseMode) -> None:
        self._pause_requested = True
        request = run_in_thread(lambda: self._server.pause(mode, timeout_s=self._timeouts.control_s))
        self._wait([request], self._timeouts.control_s, "pausing")

    def begin(self, bucket: Bucket, buffer: Tensor, ready: torch.cuda.Event | None, version: str | None) -> None:
        """Start to send a bucket; call `finish` before the next one.

        buffer, ready: as in `UpdateGroup.send`. version: the weight version, given with the last bucket only.
        """
        group = self._group
        assert group is not None, "connected"
        assert not self._in_flight, "the previous bucket is finished"
        self.weights = "mixed"

        def receive() -> None:
            timeout_s = self._timeouts.bucket_s
            self._server.receive(self._group_name, bucket.records, version=version, timeout_s=timeout_s)

        self._in_flight = [run_in_thread(receive), run_in_thread(lambda: group.send(buffer, ready))]

    def finish(self, *, was_last: bool) -> None:
        """Wait until the receiver has loaded the bucket, or has failed."""
        in_flight, self._in_flight = self._in_flight, []
        if in_flight and self._wait(in_flight, self._timeouts.bucket_s, "receiving weights") and was_last:
            self.weights = "new"

    def flush_cache(self) -> None:
        """Drop the cache of the old weights. Retried for flush_s, since it fails while requests are queued.

        A failure leaves the new weights complete, and the receiver may resume.
        """
        deadline = time.monotonic() + self._timeouts.flush_s
        while True:
            try:
                self._server.flush_cache(timeout_s=self._timeouts.control_s)
                return
            except ReceiverError as error:
                if time.monotonic() > deadline:
                    self.fail("flushing the cache, after all new weights were loaded", error)
                    return
            time.sleep(min(0.2, self._timeouts.flush_s))

    def resume(self) -> None:
        """Resume generation, if it was paused and its weights are not mixed."""
        if not self._pause_requested or self.weights == "mixed":
            return
        try:
            self._server.resume(timeout_s=self._timeouts.control_s)
        except ReceiverError as error:
            self.fail("resuming", error)

    def leave(self) -> None:
        """Destroy the group on both sides. An error of the receiver is only logged; this sync is complete."""
        if self._group is not None:
            self._close_group()
        if self._join_requested:
            try:
                self._server.leave_group(self._group_name, timeout_s=self._timeouts.control_s)
            except ReceiverError as error:
                logger.warning("receiver=%s:%d left_group=false %s", self.address.host, self.address.port, error)
        self._server.close()

    def _wait(self, futures: list[Future[None]], timeout_s: float, stage: str) -> bool:
        """Whether all `futures` succeed in time; if not, the group is aborted, which ends the others."""
        # Slightly longer than the timeouts of the operations themselves, which have better error messages.
        done, late = wait(futures, timeout=timeout_s + 5.0, return_when=FIRST_EXCEPTION)
        errors = [error for future in done if (error := future.exception()) is not None]
        if late and errors and not any(isinstance(error, ReceiverError) for error in errors):
            # The HTTP request is about to fail for the same reason, with a better error message.
            done, late = wait(futures, timeout=_ERROR_GRACE_S)
            errors = [error for future in done if (error := future.exception()) is not None]
        if not errors and not late:
            return True
        reported = next((error for error in errors if isinstance(error, ReceiverError)), None)
        self.fail(stage, reported or (errors[0] if errors else TimeoutError(f"not done within {timeout_s:g} s")))
        if self._group is not None:
            self._close_group()
        return False

    def _close_group(self) -> None:
        group, self._group = self._group, None
        assert group is not None
        # Closing may block if the receiver never joined, so do not wait for it.
        run_in_thread(group.close)

    def fail(self, stage: str, error: BaseException) -> None:
        """Mark the receiver as failed; the first reason is kept."""
        if self.failure is None:
            known = isinstance(error, (ReceiverError, RuntimeError, TimeoutError))
            self.failure = f"{stage}: {error}" if known else f"{stage}: {type(error).__name__}: {error}"
        logger.warning(
            "receiver=%s:%d weights=%s failed while %s: %s",
            self.address.host,
            self.address.port,
            self.weights,
            stage,
            error,
        )


def run_in_thread(function: Callable[[], None]) -> Future[None]:
    """Run `function` in a new daemon thread, which does not keep the process alive."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001 - passed on through the future
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    return future
