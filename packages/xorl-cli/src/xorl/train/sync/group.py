"""The trainer's side of a process group with one receiver: the rendezvous and the broadcasts.

The receiver creates a named group with torch's own functions, over a store whose address it is given. The trainer
therefore uses the same key prefixes in the store as torch does. The trainer's group is not registered with torch, so a
failing receiver ends neither the trainer's process nor its own groups.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from xorl.core.join import NCCL_INTERFACE, interface_towards, is_on_this_host, store_server
from xorl.core.torch_private import gloo_group, nccl_options

SyncBackend = Literal["nccl", "gloo"]

# By default torch aborts a process whose collectives fail or time out. Here that only means that a receiver died.
_NOT_FATAL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
_POLL_S = 2e-4


def match_sglang_nccl() -> None:
    """Set NCCL_CUMEM_ENABLE as SGLang does, unless the user has set it: all ranks of a group must agree on it.

    Call it before the first process group is created, because NCCL reads the variable only once.
    """
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")


def let_nccl_reach(hosts: Iterable[str]) -> None:
    """Let NCCL listen on the interface that leads to the first of these hosts that is a different host, if any.

    Call it before the first process group is created. The user's own NCCL_SOCKET_IFNAME takes precedence.
    """
    found = (interface_towards(host) for host in hosts if not is_on_this_host(host))
    if (interface := next(filter(None, found), None)) is not None:
        os.environ.setdefault(NCCL_INTERFACE, f"={interface}")


def require_nccl_reaches(host: str) -> None:
    """Raise RuntimeError if NCCL listens only on the loopback interface, and `host` is another host."""
    if os.environ.get(NCCL_INTERFACE, "").lstrip("=") != "lo" or is_on_this_host(host):
        return
    raise RuntimeError(
        f"NCCL of the workers listens on the loopback interface only, which {host} cannot reach. Name the server in "
        f"inference_endpoints of the service's file, or set {NCCL_INTERFACE} to the interface that leads to it "
        f"({interface_towards(host) or 'such as eth0'}), and restart the service"
    )


class Rendezvous:
    """The store through which receivers find the trainer; listens on `address` and `port` (0: any free port).

    Raises RuntimeError if it cannot listen there.
    """

    def __init__(self, address: str, port: int, *, timeout_s: float) -> None:
        try:
            self.store = store_server(address, port, timeout_s=timeout_s)
        except OSError as error:
            raise RuntimeError(
                f"master_address, master_port: cannot listen at {address}:{port} ({error.strerror}); use an address "
                "of this host, and a free port or 0 for any"
            ) from error
        self.address = address
        self.port: int = self.store.port


class UpdateGroup:
    """A process group of the trainer (rank 0) and the `num_receivers` ranks of one receiver; see `Rendezvous`.

    With gloo, the constructor waits until all ranks have joined, and raises RuntimeError if they do not in time. With
    NCCL, the first broadcast waits for them. timeout_s: the limit of a gloo broadcast.
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
        # Both backends have the methods of a ProcessGroup, but torch's type stubs lack them.
        self._group: dist.ProcessGroup
        store: dist.Store = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, rendezvous.store))
        if backend == "gloo":
            cpu_store = dist.PrefixStore("cpu/", store)
            # The other groups of this process may listen only on the loopback interface.
            limit = timedelta(seconds=timeout_s)
            gloo = gloo_group(cpu_store, 0, num_receivers + 1, rendezvous.address, limit)
            self._group = cast(dist.ProcessGroup, gloo)
            return
        # The caller enforces deadlines and aborts; torch's timeout must not fire before that.
        options = nccl_options(name, timedelta(seconds=10 * timeout_s))
        with _environment(_NOT_FATAL):
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", store), 0, num_receivers + 1, options)
        self._group = cast(dist.ProcessGroup, nccl)

    def send(self, buffer: Tensor, ready: torch.cuda.Event | None) -> None:
        """Broadcast `buffer` and wait until it may be overwritten, or until `close`. One call at a time.

        ready: recorded once the device has filled the buffer. With gloo, raises RuntimeError if the receiver died or
        does not take the data in time; with NCCL, only the receiver can report a failure.
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
        """Abort the group and any pending broadcast."""
        self._is_closed = True
        self._group.abort()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Sets environment variables, which NCCL groups read on creation, and restores them afterwards."""
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


def source_address_for(host: str) -> str:
    """The address of this host on the route to `host`, to which `host` can reply.

    Raises RuntimeError if `host` cannot be resolved or there is no route to it.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    except OSError as error:
        raise RuntimeError(
            f"{host}: cannot be resolved or reached ({error.strerror or error}); set master_address"
        ) from error
