"""A model's weights to inference servers: the one order of a sync, and what it left behind."""

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

from xorl.ckpt import TensorGroup
from xorl.train.sync.buckets import Bucket, plan_buckets
from xorl.train.sync.group import Rendezvous, SyncBackend, address_towards
from xorl.train.sync.receiver import Receiver, ReceiverAddress, Timeouts, aside
from xorl.train.sync.sglang import PauseMode

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SyncOptions:
    """How weights are sent.

    Attributes:
        master_address, master_port: where receivers find the sending rank; "" and 0 choose.
        group_name: of the process groups, which have more behind it: each sync and receiver has its own.
        bucket_bytes: of a buffer, of which there are two. A tensor that is larger travels alone.
        pause_mode: what becomes of requests in the meantime; see `SglangServer.pause`.
        flush_cache: whether what was computed with the old weights is forgotten.
        weight_version: the name of these weights, which receivers report once they have them all.
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
            raise ValueError(f"buffer_size_mb: at least 1 is wanted, got {self.bucket_bytes / 2**20:g}")
        if self.flush_cache and self.pause_mode == "in_place":
            raise ValueError(
                "flush_cache: pause_mode in_place keeps the cache of requests that wait, so it cannot be flushed; "
                "choose retract or abort, or flush_cache false"
            )


@dataclass(frozen=True)
class ReceiverOutcome:
    """What became of one receiver. With `mixed` weights it is still paused, and only a whole sync makes it sound."""

    address: ReceiverAddress
    success: bool
    message: str
    weights: Literal["old", "new", "mixed"]


@dataclass(frozen=True)
class SyncOutcome:
    """What a sync did. seconds: from the first request to the last answer; timing_s: its parts."""

    receivers: tuple[ReceiverOutcome, ...]
    seconds: float
    num_bytes: int
    num_tensors: int
    num_buckets: int
    timing_s: dict[str, float]

    @property
    def success(self) -> bool:
        """Whether every receiver has what it should have."""
        return all(receiver.success for receiver in self.receivers)


class WeightSender:
    """Sends weights from this job's rank 0, which is on `device`; every rank has one, for as long as it lives."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rendezvous: dict[tuple[str, int], Rendezvous] = {}

    def send(
        self, groups: Sequence[TensorGroup], addresses: Sequence[ReceiverAddress], options: SyncOptions
    ) -> SyncOutcome | None:
        """Send the tensors of `groups`, bucket by bucket, to each receiver; collective. None on ranks other than 0.

        Receivers fail one by one: each has a process group of its own, since a broadcast that one rank does not finish
        is lost for all of its group. One that fails before its first bucket goes on with its old weights; one that
        fails later is left paused. While a bucket is sent, the next one is made. Gradients stay as they are.

        Beside the model, rank 0 holds two buckets and the parameter that is being gathered, other ranks the latter.

        Raises ValueError where there are no receivers or no tensors.
        """
        if not addresses or not groups:
            raise ValueError(f"nothing to send: {len(groups)} groups of tensors to {len(addresses)} receivers")
        buckets = plan_buckets(groups, options.bucket_bytes)
        if dist.get_rank() == 0:
            return _Sending(buckets, addresses, options, self._device).run(self._meet)
        for bucket in buckets:
            if not _is_wanted(False):
                break
            bucket.fill_(None)
        return None

    def _meet(self, address: str, port: int, timeout_s: float) -> Rendezvous:
        # One that listens stays: a group that was given up may hold on to it, and to its port.
        if (address, port) not in self._rendezvous:
            self._rendezvous[address, port] = Rendezvous(address, port, timeout_s=timeout_s)
        return self._rendezvous[address, port]


class _Sending:
    """Rank 0's part of one sync. Nothing that a receiver does, or does not, makes it raise."""

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
        self._receivers = [
            Receiver(address, options.timeouts, group_name=name)
            for address, name in zip(addresses, _group_names(options.group_name, len(addresses)), strict=True)
        ]
        self._timing_s: dict[str, float] = {}

    def run(self, meet: Callable[[str, int, float], Rendezvous]) -> SyncOutcome:
        start = time.perf_counter()
        try:
            with self._timed("connect"):
                buffers = self._open(meet)
            with self._timed("pause"):
                self._each(lambda receiver: receiver.pause(self._options.pause_mode))
            with self._timed("transfer"):
                self._transfer(buffers)
            with self._timed("flush"):
                if self._options.flush_cache:
                    self._each(Receiver.flush_cache)
        finally:
            with self._timed("resume"):
                self._each(Receiver.resume, failed_too=True)
            with self._timed("disconnect"):
                self._each(Receiver.leave, failed_too=True)
        outcome = SyncOutcome(
            receivers=tuple(_outcome(receiver) for receiver in self._receivers),
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

    def _open(self, meet: Callable[[str, int, float], Rendezvous]) -> list[Tensor]:
        """The buffers; the groups stand then, but for those of receivers that failed."""
        options = self._options
        backend: SyncBackend = "nccl" if self._device.type == "cuda" else "gloo"
        try:
            size = max(bucket.num_bytes for bucket in self._buckets)
            buffers = [
                torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(min(2, len(self._buckets)))
            ]
            address = options.master_address or self._own_address()
            rendezvous = meet(address, options.master_port, options.timeouts.group_s)
        except RuntimeError as error:
            for receiver in self._receivers:
                receiver.fail("opening the group", error)
            return []
        self._each(lambda receiver: receiver.connect(rendezvous, backend, self._device))
        return buffers

    def _own_address(self) -> str:
        """One that all receivers can answer to, but for those that cannot be reached from here."""
        found: list[str] = []
        for receiver in self._receivers:
            try:
                found.append(address_towards(receiver.address.host))
            except RuntimeError as error:
                receiver.fail("opening the group", error)
        # What is on this host reaches its other addresses as well, but no one else reaches the loopback one.
        outside = [address for address in found if not ipaddress.ip_address(address).is_loopback]
        return next(iter([*outside, *found]), "127.0.0.1")

    def _transfer(self, buffers: Sequence[Tensor]) -> None:
        """Make each bucket while the one before it is under way."""
        for index, bucket in enumerate(self._buckets):
            if not _is_wanted(any(receiver.is_sound for receiver in self._receivers)):
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
                if receiver.is_sound:
                    receiver.begin(bucket, buffer, ready, self._options.weight_version if is_last else None)
        for receiver in self._receivers:
            receiver.finish(was_last=True)

    def _each(self, function: Callable[[Receiver], None], *, failed_too: bool = False) -> None:
        """Call `function` with every receiver at the same time."""
        calls = [
            aside(lambda receiver=receiver: function(receiver))
            for receiver in self._receivers
            if receiver.is_sound or failed_too
        ]
        for call in calls:
            call.result()

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._timing_s[part] = time.perf_counter() - start


def _is_wanted(wanted: bool) -> bool:
    """Whether rank 0 wants the next bucket; collective, so that all ranks stop together."""
    flag = torch.tensor([wanted], dtype=torch.uint8)
    dist.broadcast(flag, src=0)
    return bool(flag.item())


def _group_names(name: str, num_receivers: int) -> list[str]:
    # Never used before: neither the store nor a receiver may have kept what another sync left behind.
    return [f"{name}-{secrets.token_hex(4)}-{index}" for index in range(num_receivers)]


def _outcome(receiver: Receiver) -> ReceiverOutcome:
    return ReceiverOutcome(
        receiver.address,
        success=receiver.failure is None,
        message=receiver.failure or "",
        weights=receiver.weights,
    )
