"""The trainer's end of a process group with one receiver: where both find each other, and broadcasts to it.

A receiver builds its end as torch builds any group of a name over a store that it joins by address, so the keys under
which both ends look for each other are torch's. The group is none of the trainer's own: torch's table of groups does
not know it, and what becomes of a receiver ends neither the trainer's process nor its groups.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

SyncBackend = Literal["nccl", "gloo"]

# torch kills a process whose collectives time out or fail. Here that is a receiver's death, which concerns no one else.
_NOT_FATAL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
_POLL_S = 2e-4


def match_receivers() -> None:
    """Let NCCL allocate as it does in SGLang, unless the user has set it: the ends of a group must not differ in it.

    NCCL reads it once, so this comes before the process's first group.
    """
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")


class Rendezvous:
    """Where receivers find the trainer: a store that listens at `address`, on `port` or, for 0, on a free one.

    Raises RuntimeError where nothing can listen there.
    """

    def __init__(self, address: str, port: int, *, timeout_s: float) -> None:
        try:
            listening = _listen(address, port)
        except OSError as error:
            raise RuntimeError(
                f"master_address, master_port: cannot listen at {address}:{port} ({error.strerror}); give an address "
                "of this host, and a free port or 0 for any"
            ) from error
        self.address = address
        self.port: int = listening.getsockname()[1]
        self.store = dist.TCPStore(
            address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listening.detach(),
        )


def _listen(address: str, port: int) -> socket.socket:
    """At that address alone, where it is one; the store by itself would listen on every interface."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        # A name may stand for another address here, a loopback one even, than it does for the receivers.
        return socket.create_server(("", port), backlog=128)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=128)


class UpdateGroup:
    """A group of the trainer, rank 0, and the `num_receivers` ranks of one receiver; see `Rendezvous`.

    With gloo the constructor returns when all ranks are there, and raises RuntimeError when they are not in time; with
    NCCL the first broadcast waits for them. timeout_s: what a gloo broadcast may take.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        name: str,
        *,
        num_receivers: int,
        backend: SyncBackend,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._device = device
        self._is_closed = False
        # Both have the collectives of a group, but torch's stubs do not say so.
        self._group: dist.ProcessGroup
        store: dist.Store = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, rendezvous.store))
        if backend == "gloo":
            cpu_store = dist.PrefixStore("cpu/", store)
            gloo = dist.ProcessGroupGloo(cpu_store, 0, num_receivers + 1, timedelta(seconds=timeout_s))
            self._group = cast(dist.ProcessGroup, gloo)
            return
        options = dist.ProcessGroupNCCL.Options()
        # Deadlines are the caller's, who aborts; torch's own would only come after them.
        options._timeout = timedelta(seconds=10 * timeout_s)
        options.group_name = c10d.GroupName(name)
        with _environment(_NOT_FATAL):
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", store), 0, num_receivers + 1, options)
        self._group = cast(dist.ProcessGroup, nccl)

    def send(self, buffer: Tensor, ready: torch.cuda.Event | None) -> None:
        """Send the bytes of `buffer` to every receiver and wait until it may be overwritten, or until `close`.

        ready: when the device has filled the buffer. One call at a time. With gloo, raises RuntimeError for a receiver
        that is gone or does not take them in time; with NCCL, only the receiver can tell.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        if ready is None:
            self._group.broadcast([buffer], options).wait()
            return
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            work = self._group.broadcast([buffer], options)
        while not (work.is_completed() or self._is_closed):
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Leave the group, whatever is under way: nothing waits for the receiver any more."""
        self._is_closed = True
        self._group.abort()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """NCCL's groups read their settings from the environment when they are made."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def address_towards(host: str) -> str:
    """The address of this host that packets to `host` leave from, and that it can answer to.

    Raises RuntimeError where `host` cannot be resolved or reached.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    except OSError as error:
        raise RuntimeError(f"{host}: no way there is known ({error.strerror or error}); set master_address") from error
