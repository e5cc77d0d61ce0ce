"""How the ranks of a job find each other, before their process group exists: a store, and who is where."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

# Ranks prepare their data before they join, which may take longer on one host than on another.
ARRIVE_S = 1800.0
# After all ranks have arrived, they connect to each other within seconds.
CONNECT_S = 120.0
POLL_S = 0.2
FAILED = "xorl/failed"  # the key of why the job cannot go on: as JSON, the kind of failure and a text
_ARRIVED = "xorl/arrived"
_SIOCGIFADDR = 0x8915  # linux/sockios.h
INTERFACE = "GLOO_SOCKET_IFNAME"


class JoinError(RuntimeError):
    """The ranks of the job cannot reach each other."""


@dataclass(frozen=True)
class Place:
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


@dataclass(frozen=True)
class Peers:
    """All ranks of a job, in their order, and a store that they share."""

    store: dist.Store
    places: tuple[Place, ...]

    @property
    def num_hosts(self) -> int:
        return len({place.network for place in self.places})

    def at(self, address: str) -> tuple[Place, ...]:
        """The ranks on the host that has this address."""
        networks = {place.network for place in self.places if place.address == address}
        return tuple(place for place in self.places if place.network in networks)


def meet(rank: int, world_size: int, *, arrive_s: float = ARRIVE_S) -> Peers:
    """Wait until every rank has called this; needs the environment variables of torchrun. Collective.

    Raises JoinError if the store cannot be reached, if ranks are missing after `arrive_s` seconds, if a rank has
    failed meanwhile, or if ranks on several hosts announce addresses that only their own host can reach.
    """
    endpoint = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    # torchrun's store exists before the ranks do; without it, rank 0 starts one when it arrives.
    limit_s = CONNECT_S if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else arrive_s
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timedelta(seconds=limit_s)))
    except RuntimeError as error:
        raise JoinError(
            f"rank {rank} on host {platform.node()} could not reach the job's store at {endpoint} (MASTER_ADDR and "
            f"MASTER_PORT) within {limit_s:g} s. Check that this address is one of the host of rank 0, and that no "
            f"firewall closes the port: {error}"
        ) from error
    if (restart := os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) != "0":
        store = dist.PrefixStore(f"restart_{restart}", store)  # what earlier ranks wrote is still there
    own = Place(rank, platform.node(), _network(), _gloo_address())
    store.set(_key(rank), json.dumps(asdict(own)))
    store.add(_ARRIVED, 1)
    deadline = time.monotonic() + arrive_s
    while store.add(_ARRIVED, 0) < world_size:
        if store.check([FAILED]):
            raise JoinError(f"the job cannot start: {json.loads(store.get(FAILED))[1]}")
        if time.monotonic() > deadline:
            missing = [str(other) for other in range(world_size) if not store.check([_key(other)])]
            raise JoinError(
                f"{len(missing)} of {world_size} ranks have not reached the store at {endpoint} within {arrive_s:g} s: "
                f"{', '.join(missing[:8])}{', ...' * (len(missing) > 8)}. Look at the output of their hosts"
            )
        time.sleep(POLL_S)
    places = tuple(Place(**json.loads(text)) for text in store.multi_get([_key(other) for other in range(world_size)]))
    peers = Peers(store, places)
    unreachable = [place for place in places if place.is_loopback]
    if peers.num_hosts > 1 and unreachable:
        raise JoinError(
            f"{_listed(unreachable)}: only processes of the same host can connect to "
            f"{'this address' if len(unreachable) == 1 else 'these addresses'}. {interface_advice()}"
        )
    return peers


def interface_advice() -> str:
    """How to choose the network interface through which ranks connect."""
    names = ", ".join(name for _, name in socket.if_nameindex())
    return (
        f"gloo listens at the address to which the host name resolves; set {INTERFACE}, and NCCL_SOCKET_IFNAME for "
        f"GPUs, on every host to the interface that reaches the others, such as eth0. {platform.node()} has {names}"
    )


def could_not_connect(peers: Peers, rank: int, error: Exception) -> JoinError:
    """The error of a rank that could not connect to the others."""
    others = [place for place in peers.places if place.network != peers.places[rank].network] or peers.places
    return JoinError(
        f"{peers.places[rank]} could not connect to all other ranks, for which it has {CONNECT_S:g} s. "
        f"It tried {_listed(others)}. {interface_advice()}: {str(error).splitlines()[0]}"
    )


def _listed(places: Iterable[Place]) -> str:
    texts = [str(place) for place in places]
    return ", ".join(texts[:8]) + ", ..." * (len(texts) > 8)


def _key(rank: int) -> str:
    return f"xorl/place/{rank}"


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
        return _interface_address(interface) or f"interface {interface}"
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return "127.0.0.1"
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind((address[0], 0))
            except OSError:
                continue
            return str(address[0])
    return "127.0.0.1"


def _interface_address(interface: str) -> str | None:
    """The IPv4 address of an interface; None if it has none, or if this is not Linux."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
