"""One receiver in one sync, as the sending rank sees it: what it was sent, what it holds now, and what went wrong."""

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

SECOND_WORD_S = 1.0


@dataclass(frozen=True)
class ReceiverAddress:
    """Where an inference server answers HTTP, and on how many ranks it runs."""

    host: str
    port: int
    world_size: int = 1


@dataclass(frozen=True)
class Timeouts:
    """How long a receiver may take before it counts as gone, in seconds.

    connect_s: to accept a connection. group_s: to join the group. bucket_s: to take one bucket. control_s: to pause, to
    go on, to drop a group. flush_s: to become free for a flush.
    """

    connect_s: float = 5.0
    group_s: float = 120.0
    bucket_s: float = 120.0
    control_s: float = 30.0
    flush_s: float = 10.0


class Receiver:
    """What is done with one receiver, in the order of the methods. None of them raises for what the receiver does.

    Attributes:
        weights: what it holds: the old ones, the new ones, or a mixture, with which it is never told to go on.
        failure: why it has not all that it should have; then nothing more is sent to it.
    """

    def __init__(self, address: ReceiverAddress, timeouts: Timeouts, *, group_name: str) -> None:
        self.address = address
        self.weights: Literal["old", "new", "mixed"] = "old"
        self.failure: str | None = None
        self._timeouts = timeouts
        self._group_name = group_name
        self._server = SglangServer(address.host, address.port, connect_timeout_s=timeouts.connect_s)
        self._group: UpdateGroup | None = None
        self._asked_to_join = False
        self._asked_to_pause = False
        self._in_flight: list[Future[None]] = []

    @property
    def is_sound(self) -> bool:
        """Whether it takes what comes next."""
        return self.failure is None

    def connect(self, rendezvous: Rendezvous, backend: SyncBackend, device: torch.device) -> None:
        """Build the group with it."""
        self._asked_to_join = True
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

        self._await([aside(join), aside(build)], self._timeouts.group_s, "joining the group")

    def pause(self, mode: PauseMode) -> None:
        """Let it stop generating."""
        self._asked_to_pause = True
        request = aside(lambda: self._server.pause(mode, timeout_s=self._timeouts.control_s))
        self._await([request], self._timeouts.control_s, "pausing")

    def begin(self, bucket: Bucket, buffer: Tensor, ready: torch.cuda.Event | None, version: str | None) -> None:
        """Start to send a bucket; `version` is that of the weights, with the last one. `finish` comes before the next.

        buffer, ready: as of `UpdateGroup.send`.
        """
        group = self._group
        assert group is not None, "connected"
        assert not self._in_flight, "the bucket before is finished"
        self.weights = "mixed"

        def receive() -> None:
            timeout_s = self._timeouts.bucket_s
            self._server.receive(self._group_name, bucket.records, version=version, timeout_s=timeout_s)

        self._in_flight = [aside(receive), aside(lambda: group.send(buffer, ready))]

    def finish(self, *, was_last: bool) -> None:
        """Wait until the bucket is there and loaded, or the receiver has failed."""
        in_flight, self._in_flight = self._in_flight, []
        if in_flight and self._await(in_flight, self._timeouts.bucket_s, "receiving weights") and was_last:
            self.weights = "new"

    def flush_cache(self) -> None:
        """Let it forget what it computed with other weights; it refuses while requests wait, so this tries for a while.

        A failure leaves the new weights whole, and the receiver may go on.
        """
        deadline = time.monotonic() + self._timeouts.flush_s
        while True:
            try:
                self._server.flush_cache(timeout_s=self._timeouts.control_s)
                return
            except ReceiverError as error:
                if time.monotonic() > deadline:
                    self.fail("flushing the cache, with the new weights whole", error)
                    return
            time.sleep(min(0.2, self._timeouts.flush_s))

    def resume(self) -> None:
        """Let it go on, if it was paused and holds weights of one kind."""
        if not self._asked_to_pause or self.weights == "mixed":
            return
        try:
            self._server.resume(timeout_s=self._timeouts.control_s)
        except ReceiverError as error:
            self.fail("going on", error)

    def leave(self) -> None:
        """Drop the group on both sides. A receiver that does not is a failure only of the next sync."""
        if self._group is not None:
            self._close_group()
        if self._asked_to_join:
            try:
                self._server.leave_group(self._group_name, timeout_s=self._timeouts.control_s)
            except ReceiverError as error:
                logger.warning("receiver=%s:%d left_group=false %s", self.address.host, self.address.port, error)
        self._server.close()

    def _await(self, futures: list[Future[None]], timeout_s: float, stage: str) -> bool:
        """Whether all of `futures` came to their end in time; else the group is given up, so that none goes on."""
        # A little more than what each waits for by itself, whose message says more.
        done, late = wait(futures, timeout=timeout_s + 5.0, return_when=FIRST_EXCEPTION)
        errors = [error for future in done if (error := future.exception()) is not None]
        if late and errors and not any(isinstance(error, ReceiverError) for error in errors):
            # The server's answer is about to fail for the same reason, and knows it better.
            done, late = wait(futures, timeout=SECOND_WORD_S)
            errors = [error for future in done if (error := future.exception()) is not None]
        if not errors and not late:
            return True
        told = next((error for error in errors if isinstance(error, ReceiverError)), None)
        self.fail(stage, told or (errors[0] if errors else TimeoutError(f"not done within {timeout_s:g} s")))
        if self._group is not None:
            self._close_group()
        return False

    def _close_group(self) -> None:
        group, self._group = self._group, None
        assert group is not None
        # A group whose other end never came may not be left at once; nobody waits for it.
        aside(group.close)

    def fail(self, stage: str, error: BaseException) -> None:
        """Note that nothing more is to be sent; the first reason is the one that is told."""
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


def aside(function: Callable[[], None]) -> Future[None]:
    """Run `function` in a thread of its own, which does not keep the process alive."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001 - the future's owner sees it
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    return future
