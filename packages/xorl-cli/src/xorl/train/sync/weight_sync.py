"""WeightSender: sends a model's weights to inference servers, stage by stage, and reports the outcome."""

from __future__ import annotations

import ipaddress
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from xorl.ckpt.tensor_file import TensorGroup
from xorl.train.sync.buckets import Bucket, plan_buckets
from xorl.train.sync.group import Rendezvous, SyncBackend, require_nccl_reaches, source_address_for
from xorl.train.sync.receiver import Receiver, ReceiverAddress, Timeouts, run_in_thread
from xorl.train.sync.sglang import PauseMode

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SyncOptions:
    """The options of a sync.

    Attributes:
        master_address, master_port: where receivers connect to the sending rank; "" and 0 choose automatically.
        group_name: prefix of the process group names, which are unique for each sync and receiver.
        bucket_bytes: the size of each of the two send buffers. A larger tensor is sent in its own, larger bucket.
        pause_mode: how receivers treat running requests during the sync; see `SglangServer.pause`.
        flush_cache: whether receivers drop the cache of the old weights.
        weight_version: the version that receivers report once they have all weights.
    """

    master_address: str = ""
    master_port: int = 0
    group_name: str = "weight_sync_group"
    bucket_bytes: int = 1024 << 20
    pause_mode: PauseMode = "retract"
    flush_cache: bool = True
    weight_version: str | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"buffer_size_mb: must be at least 1, got {self.bucket_bytes / 2**20:g}")
        if self.flush_cache and self.pause_mode == "in_place":
            raise ValueError(
                "flush_cache: pause_mode in_place keeps the cache of paused requests, so it cannot be flushed; use "
                "pause_mode retract or abort, or set flush_cache to false"
            )


@dataclass(frozen=True)
class ReceiverOutcome:
    """The outcome of one receiver. With `mixed` weights it stays paused until a later sync succeeds."""

    address: ReceiverAddress
    success: bool
    message: str
    weights: Literal["old", "new", "mixed"]


@dataclass(frozen=True)
class SyncOutcome:
    """The outcome of a sync. seconds: from the first request to the last response; timing_s: by stage."""

    receivers: tuple[ReceiverOutcome, ...]
    seconds: float
    num_bytes: int
    num_tensors: int
    num_buckets: int
    timing_s: dict[str, float]

    @property
    def success(self) -> bool:
        return all(receiver.success for receiver in self.receivers)


class WeightSender:
    """Sends weights from rank 0. Every rank creates one, on its `device`, for the lifetime of the process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rendezvous: dict[tuple[str, int], Rendezvous] = {}

    def send(
        self, groups: Sequence[TensorGroup], addresses: Sequence[ReceiverAddress], options: SyncOptions
    ) -> SyncOutcome | None:
        """Send `groups` to every receiver, bucket by bucket; collective. Returns None on ranks other than 0.

        Each receiver has its own process group, so that it fails alone: a broadcast that one rank does not finish fails
        for its whole group. A receiver that fails before its first bucket resumes with its old weights; one that fails
        later stays paused. While a bucket is being sent, the next one is gathered. Gradients are not changed.

        In addition to the model, rank 0 needs memory for two buckets and one gathered parameter, other ranks only for
        the parameter.

        Raises ValueError if there are no receivers or no tensors.
        """
        if not addresses or not groups:
            raise ValueError(f"nothing to send: {len(groups)} groups of tensors to {len(addresses)} receivers")
        buckets = plan_buckets(groups, options.bucket_bytes)
        if dist.get_rank() == 0:
            return _Sync(buckets, addresses, options, self._device).run(self._rendezvous_at)
        for bucket in buckets:
            if not _all_continue(False):
                break
            bucket.fill_(None)
        return None

    def _rendezvous_at(self, address: str, port: int, timeout_s: float) -> Rendezvous:
        # Reused, never closed: an aborted group may still hold the store and its port.
        if (address, port) not in self._rendezvous:
            self._rendezvous[address, port] = Rendezvous(address, port, timeout_s=timeout_s)
        return self._rendezvous[address, port]


class _Sync:
    """Rank 0's part of one sync. A failing receiver never makes it raise."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        addresses: Sequence[ReceiverAddress],
        options: SyncOptions,
        device: torch.device,
    ) -> None:
        self._buckets = buckets
        self._options = options
        self._device = device
        # The names are unique because the store or a receiver may still have the state of an earlier sync.
        self._receivers = [
            Receiver(address, options.timeouts, group_name=f"{options.group_name}-{secrets.token_hex(4)}-{index}")
            for index, address in enumerate(addresses)
        ]
        self._timing_s: dict[str, float] = {}

    def run(self, rendezvous_at: Callable[[str, int, float], Rendezvous]) -> SyncOutcome:
        start = time.perf_counter()
        try:
            with self._timed("connect"):
                buffers = self._open(rendezvous_at)
            with self._timed("pause"):
                self._for_each(lambda receiver: receiver.pause(self._options.pause_mode))
            with self._timed("transfer"):
                self._transfer(buffers)
            with self._timed("flush"):
                if self._options.flush_cache:
                    self._for_each(Receiver.flush_cache)
        finally:
            with self._timed("resume"):
                self._for_each(Receiver.resume, include_failed=True)
            with self._timed("disconnect"):
                self._for_each(Receiver.leave, include_failed=True)
        outcome = SyncOutcome(
            receivers=tuple(
                ReceiverOutcome(each.address, success=each.is_healthy, message=each.failure or "", weights=each.weights)
                for each in self._receivers
            ),
            seconds=time.perf_counter() - start,
            num_bytes=sum(bucket.num_bytes for bucket in self._buckets),
            num_tensors=sum(len(bucket.records) for bucket in self._buckets),
            num_buckets=len(self._buckets),
            timing_s=self._timing_s,
        )
        logger.info(
            "event=weights_sent receivers=%d succeeded=%d bytes=%d seconds=%.3f version=%s",
            len(outcome.receivers),
            sum(each.success for each in outcome.receivers),
            outcome.num_bytes,
            outcome.seconds,
            self._options.weight_version,
        )
        return outcome

    def _open(self, rendezvous_at: Callable[[str, int, float], Rendezvous]) -> list[Tensor]:
        """Connect the groups of all receivers and return the send buffers; [] if rank 0 itself fails."""
        options = self._options
        backend: SyncBackend = "nccl" if self._device.type == "cuda" else "gloo"
        try:
            size = max(bucket.num_bytes for bucket in self._buckets)
            buffers = [
                torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(min(2, len(self._buckets)))
            ]
            if backend == "nccl":
                self._fail_unreachable()
            address = options.master_address or self._choose_address()
            rendezvous = rendezvous_at(address, options.master_port, options.timeouts.group_s)
        except RuntimeError as error:
            for receiver in self._receivers:
                receiver.fail("opening the group", error)
            return []
        self._for_each(lambda receiver: receiver.connect(rendezvous, backend, self._device))
        return buffers

    def _fail_unreachable(self) -> None:
        for receiver in self._receivers:
            try:
                require_nccl_reaches(receiver.address.host)
            except RuntimeError as error:
                receiver.fail("opening the group", error)

    def _choose_address(self) -> str:
        """An address of this host that all reachable receivers can connect to; the others are marked as failed."""
        found: list[str] = []
        for receiver in self._receivers:
            try:
                found.append(source_address_for(receiver.address.host))
            except RuntimeError as error:
                receiver.fail("opening the group", error)
        # Receivers on this host can connect to any of its addresses, others only to those that are not loopback.
        external = [address for address in found if not ipaddress.ip_address(address).is_loopback]
        return next(iter([*external, *found]), "127.0.0.1")

    def _transfer(self, buffers: Sequence[Tensor]) -> None:
        """Gather each bucket while the previous one is being sent."""
        for index, bucket in enumerate(self._buckets):
            if not _all_continue(any(receiver.is_healthy for receiver in self._receivers)):
                break
            buffer = buffers[index % 2][: bucket.num_bytes]
            bucket.fill_(buffer)
            ready = None
            if self._device.type == "cuda":
                ready = torch.cuda.Event()
                ready.record(torch.cuda.current_stream(self._device))
            is_last = index == len(self._buckets) - 1
            for receiver in self._receivers:
                receiver.finish(was_last=False)
            for receiver in self._receivers:
                if receiver.is_healthy:
                    receiver.begin(bucket, buffer, ready, self._options.weight_version if is_last else None)
        for receiver in self._receivers:
            receiver.finish(was_last=True)

    def _for_each(self, function: Callable[[Receiver], None], *, include_failed: bool = False) -> None:
        """Call `function` with all receivers concurrently and wait."""
        calls = [
            run_in_thread(lambda receiver=receiver: function(receiver))
            for receiver in self._receivers
            if receiver.is_healthy or include_failed
        ]
        for call in calls:
            call.result()

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._timing_s[stage] = time.perf_counter() - start


def _all_continue(value: bool) -> bool:
    """Broadcast rank 0's decision to continue with the next bucket, so that all ranks stop together; collective."""
    flag = torch.tensor([value], dtype=torch.uint8)
    dist.broadcast(flag, src=0)
    return bool(flag.item())
