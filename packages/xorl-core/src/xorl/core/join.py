"""How the ranks of a job find each other, before their process group exists: a store, and who is where."""

from __future__ import annotations

import fcntl
import ipaddress
import json
import logging
import os
import platform
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from xorl.core.folder_store import FolderStore
from xorl.core.launched import STORE_VARIABLE

logger = logging.getLogger(__name__)

# Ranks prepare their data before they join, which may take longer on one host than on another.
ARRIVE_S = 1800.0
# After all ranks have arrived, they connect to each other within seconds.
CONNECT_S = 120.0
POLL_S = 0.05
FAILED = "xorl/failed"  # the key of why the job cannot go on: as JSON, the kind of failure and a text
_ARRIVED = "xorl/arrived"
_SIOCGIFADDR = 0x8915  # linux/sockios.h
# The stores that this process keeps, by endpoint: its ranks may meet again.
_kept: dict[str, dist.Store] = {}
INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
_LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACES = ("lo", "lo0")  # of Linux, and of macOS and BSD


class JoinError(RuntimeError):
    """The ranks of the job cannot reach each other."""


@dataclass(frozen=True)
class Location:
    """Where a rank runs. `network` differs between hosts; `address` is the one at which gloo listens."""

    rank: int
    host: str
    network: str
    address: str

    def __str__(self) -> str:
        return f"rank {self.rank} on host {self.host} ({self.address})"

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of the same host can connect to the address."""
        return self.address.startswith("127.") or self.address == "::1"


class WatchStore(Protocol):
    """The store operations that a watch uses. A key must have a value when it is read; `expected` is always ""."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


@dataclass(frozen=True)
class Peers:
    """All ranks of a job, in their order, and a store that they share."""

    store: dist.Store
    locations: tuple[Location, ...]

    def watch_store(self, timeout: timedelta) -> WatchStore:
        """A store for use in another thread, which may publish values as long as the job runs."""
        if isinstance(self.store, dist.FileStore):
            return FolderStore(Path(self.store.path).with_name("watch"))  # pyright: ignore[reportAttributeAccessIssue]
        store: dist.Store = self.store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        store.set_timeout(timeout)
        return store

    @property
    def num_hosts(self) -> int:
        return len({location.network for location in self.locations})

    def at(self, address: str) -> tuple[Location, ...]:
        """The ranks on the host that has this address."""
        networks = {location.network for location in self.locations if location.address == address}
        return tuple(location for location in self.locations if location.network in networks)


def rendezvous(rank: int, world_size: int, *, arrive_s: float = ARRIVE_S) -> Peers:
    """Wait until every rank has called this; needs the variables of torchrun or of xorl's launchers. Collective.

    If all ranks are on one host, their process groups listen on its loopback interface, unless the user chose another.
    Raises JoinError if the store cannot be reached, if ranks are missing after `arrive_s` seconds, if a rank has
    failed meanwhile, or if MASTER_ADDR or the addresses of ranks on several hosts mean only the own host.
    """
    store, name = _open_store(rank, arrive_s)
    own = Location(rank, platform.node(), _network(), _gloo_address())
    store.set(_key(rank), json.dumps(asdict(own)))
    store.add(_ARRIVED, 1)
    deadline = time.monotonic() + arrive_s
    while store.add(_ARRIVED, 0) < world_size:
        if store.check([FAILED]):
            raise JoinError(f"the job cannot start: {json.loads(store.get(FAILED))[1]}")
        if time.monotonic() > deadline:
            missing = [str(other) for other in range(world_size) if not store.check([_key(other)])]
            raise JoinError(
                f"{len(missing)} of {world_size} ranks have not reached the store at {name} within {arrive_s:g} s: "
                f"{', '.join(missing[:8])}{', ...' * (len(missing) > 8)}. Look at the output of their hosts"
            )
        time.sleep(POLL_S)
    locations = tuple(
        Location(**json.loads(text)) for text in store.multi_get([_key(other) for other in range(world_size)])
    )
    if len({location.network for location in locations}) == 1:
        stay_on_loopback()
        return Peers(store, tuple(replace(location, address=_gloo_address()) for location in locations))
    unreachable = [location for location in locations if location.is_loopback]
    if unreachable:
        raise JoinError(
            f"{_listed(unreachable)}: only processes of the same host can connect to "
            f"{'this address' if len(unreachable) == 1 else 'these addresses'}. {interface_advice()}"
        )
    if rank == 0:
        logger.warning(
            "event=open_ports store=%s gloo=%s: the store, gloo and NCCL ask for no password, and whoever can connect "
            "to them may run code as this user. Let only the job's hosts reach the store's port and the ports that the "
            "system chooses (net.ipv4.ip_local_port_range)",
            name,
            ",".join(sorted({location.address for location in locations})),
        )
    return Peers(store, locations)


def stay_on_loopback() -> None:
    """Lets gloo and NCCL listen only on the loopback interface, unless the user has chosen an interface.

    For jobs whose ranks are all on one host. NCCL then sends its data over NVLink, PCIe or shared memory; its sockets
    only serve to connect the ranks.
    """
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in _LOOPBACK_INTERFACES if name in names), None)
    if loopback is not None:
        os.environ.setdefault(INTERFACE, loopback)
        os.environ.setdefault(NCCL_INTERFACE, f"={loopback}")  # without "=", it would be a prefix


def listen_at(address: str, port: int) -> socket.socket:
    """Listen on the interface that has this address; torch's stores would listen on all interfaces.

    A host name that resolves to loopback or to no local interface here may still resolve to this host elsewhere. This
    function then listens on all interfaces, and logs a warning. Raises OSError if it cannot listen.
    """
    try:
        found = [str(ipaddress.ip_address(address))]
    except ValueError:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)})
        is_loopback = any(ipaddress.ip_address(each).is_loopback for each in found) and address != "localhost"
        if is_loopback or not any(map(_is_local, found)):
            logger.warning(
                "event=listens_everywhere address=%s port=%d: the name resolves to %s, which other hosts cannot reach, "
                "so the store listens on all interfaces: close the port to all but the job's hosts, or give an IP "
                "address of this host",
                address,
                port,
                ", ".join(found),
            )
            return socket.create_server(("", port), backlog=128)
    local = next(filter(_is_local, found), found[0])
    return socket.create_server((local, port), family=_family(local), backlog=128)


def store_server(address: str, port: int, *, timeout_s: float) -> dist.TCPStore:
    """Start a store that listens as `listen_at` does. Raises OSError or RuntimeError if it cannot."""
    listening = listen_at(address, port)
    return dist.TCPStore(
        address,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening.detach(),
    )


def store_client(address: str, port: int, *, timeout_s: float) -> dist.TCPStore:
    """Connect to a store. Raises RuntimeError if it does not answer in time."""
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def _open_store(rank: int, arrive_s: float) -> tuple[dist.Store, str]:
    """The job's store, and its name for messages."""
    given = os.environ.get(STORE_VARIABLE)
    if given is not None and given.startswith("/"):
        return dist.FileStore(given), given
    endpoint = given or f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    address, _, port = endpoint.rpartition(":")
    address = address.strip("[]")
    # A launcher starts the store before the ranks; without a launcher, rank 0 starts it when it arrives.
    is_of_launcher = given is not None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not is_of_launcher and os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        address = _LOOPBACK  # all ranks are on this host, and all of them have these variables
    elif not is_of_launcher and "LOCAL_WORLD_SIZE" in os.environ and _is_loopback_everywhere(address):
        raise JoinError(
            f"MASTER_ADDR is {address}, which is a different host on each host, but the job has several "
            f"(WORLD_SIZE {os.environ.get('WORLD_SIZE')}, LOCAL_WORLD_SIZE {os.environ['LOCAL_WORLD_SIZE']}). Set it "
            "to an address of the host of rank 0 that the other hosts can reach"
        )
    limit_s = CONNECT_S if is_of_launcher else arrive_s
    keeps_it = rank == 0 and not is_of_launcher
    try:
        if keeps_it and endpoint not in _kept:
            _kept[endpoint] = store_server(address, int(port), timeout_s=limit_s)
        store: dist.Store = store_client(address, int(port), timeout_s=limit_s)
    except (RuntimeError, OSError) as error:
        origin = STORE_VARIABLE if given is not None else "MASTER_ADDR and MASTER_PORT"
        raise JoinError(
            f"rank {rank} on host {platform.node()} could not reach the job's store at {endpoint} ({origin}) within "
            f"{limit_s:g} s. Check that this address is one of the host of rank 0, and that no firewall closes the "
            f"port: {error}"
        ) from error
    if (restart := os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) != "0":
        store = dist.PrefixStore(f"restart_{restart}", store)  # values of earlier ranks are still there
    return store, endpoint


def interface_advice() -> str:
    """How to choose the network interface through which ranks connect."""
    names = ", ".join(name for _, name in socket.if_nameindex())
    return (
        f"gloo listens at the address to which the host name resolves; set {INTERFACE}, and NCCL_SOCKET_IFNAME for "
        f"GPUs, on every host to the interface that reaches the others, such as eth0. {platform.node()} has {names}"
    )


def could_not_connect(peers: Peers, rank: int, error: Exception) -> JoinError:
    """The error of a rank that could not connect to the others."""
    own = peers.locations[rank]
    others = [location for location in peers.locations if location.network != own.network] or peers.locations
    return JoinError(
        f"{own} could not connect to all other ranks, for which it has {CONNECT_S:g} s. "
        f"It tried {_listed(others)}. {interface_advice()}: {str(error).splitlines()[0]}"
    )


def _listed(locations: Iterable[Location]) -> str:
    texts = [str(location) for location in locations]
    return ", ".join(texts[:8]) + ", ..." * (len(texts) > 8)


def _key(rank: int) -> str:
    return f"xorl/location/{rank}"


def _network() -> str:
    """What all processes that reach each other at loopback addresses have in common."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # not Linux
        return platform.node()


def _gloo_address() -> str:
    """The address at which gloo listens: of the interface that the user chose, else of the host name, else loopback."""
    interface = os.environ.get(INTERFACE, "").split(",")[0]
    if interface:
        if interface in _LOOPBACK_INTERFACES:
            return _LOOPBACK
        return _interface_address(interface) or f"interface {interface}"
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return _LOOPBACK
    return next((str(entry[4][0]) for entry in found if _is_local(str(entry[4][0]))), _LOOPBACK)


def interface_towards(address: str) -> str | None:
    """The interface that has an address or leads to it; None for loopback, or if unknown."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing
            source = probe.getsockname()[0]
    except OSError:
        return None
    names = (name for _, name in socket.if_nameindex())
    found = next((name for name in names if _interface_address(name) == source), None)
    return None if ipaddress.ip_address(source).is_loopback else found


def is_on_this_host(host: str) -> bool:
    """Whether a host name or address belongs to an interface of this host; False if it cannot be resolved."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_is_local(str(entry[4][0])) for entry in found)


def _is_loopback_everywhere(address: str) -> bool:
    """Whether the address or name means the own host on every host. Other names may resolve differently elsewhere."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _is_local(address: str) -> bool:
    """Whether an interface of this host has this address."""
    with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _interface_address(interface: str) -> str | None:
    """The IPv4 address of an interface; None if it has none, or if this is not Linux."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
