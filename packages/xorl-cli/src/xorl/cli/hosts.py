"""Connects the launchers of several hosts: they meet before the ranks start, and report why a host ends.

Node 0 keeps the job's store, which the ranks use too. Nothing in it is unpickled.
"""

import json
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from xorl.core.launched import store_at
from xorl.host.failures import LostRankError
from xorl.host.ranks import Nodes

if TYPE_CHECKING:
    from torch.distributed import TCPStore

RENDEZVOUS_S = 600.0  # how long the launchers of all hosts wait for each other
CONNECT_S = 5.0  # for one attempt
POLL_S = 0.2
TELL_S = 5.0  # how long the other hosts have to read why this one failed


class HostsError(RuntimeError):
    """The launchers of the job's hosts did not meet."""


class _TakenError(RuntimeError):
    """Another launcher has this one's index; it may belong to an earlier job that is about to end."""


class Hosts:
    """This launcher's connection to the launchers of the other hosts. `endpoint` is an address of node 0 and a port."""

    def __init__(self, nodes: Nodes, endpoint: tuple[str, int], job_id: str) -> None:
        self._nodes, self._endpoint, self._job_id = nodes, endpoint, job_id
        self._store: TCPStore | None = None

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables for the ranks of this host."""
        # torch takes seconds to import, so the configuration is validated before.
        from xorl.core.join import INTERFACE, interface_towards  # noqa: PLC0415

        variables = store_at(*self._endpoint)
        if self._nodes.num_nodes > 1 and INTERFACE not in os.environ:
            interface = interface_towards(self._endpoint[0])
            variables |= {} if interface is None else {INTERFACE: interface}
        return variables

    def rendezvous(self, stops: Sequence[int]) -> None:
        """Wait until the launchers of all hosts have arrived, or `stops` is not empty.

        Raises HostsError if they do not meet within RENDEZVOUS_S, and ValueError if their flags differ.
        """
        deadline = time.monotonic() + RENDEZVOUS_S
        reason = "not all hosts have come"
        while not stops and time.monotonic() < deadline:
            try:
                self._store = self._open()
                own = self._announce(self._store)
                if self._wait(self._store, stops, deadline):
                    self._compare(self._store, own)
                    return
            except (RuntimeError, OSError) as error:
                reason = str(error).splitlines()[0]
                if self._store is None and self._nodes.node_rank == 0 and not isinstance(error, socket.gaierror):
                    address, port = self._endpoint
                    raise HostsError(
                        f"node 0 cannot listen at {address}:{port} ({reason}): --master-addr must be an address of "
                        "this host, and --master-port a free port"
                    ) from error
            time.sleep(POLL_S)
        if not stops:
            raise HostsError(self._missed(reason))

    def tell(self, text: str) -> None:
        """Publish the reason why this host ends in the job's store, which the ranks of the other hosts watch."""
        if self._store is None or self._nodes.num_nodes == 1:
            return
        # torch takes seconds to import, so the configuration is validated before.
        from xorl.core.join import FAILED  # noqa: PLC0415

        node = f"node {self._nodes.node_rank} ({platform.node()})"
        with suppress(RuntimeError, OSError):  # the store ended with its host
            # If that host has vanished, this times out, unlike an operation of the store.
            socket.create_connection(self._endpoint, TELL_S).close()
            self._store.compare_set(FAILED, "", json.dumps([LostRankError.__name__, f"{node} ended: {text}"]))
            if self._nodes.node_rank == 0:
                time.sleep(TELL_S)  # the store is in this process

    def _open(self) -> "TCPStore":
        from xorl.core.join import store_client, store_server  # noqa: PLC0415 - as above

        if self._nodes.node_rank == 0:
            return store_server(*self._endpoint, timeout_s=RENDEZVOUS_S)
        socket.create_connection(self._endpoint, CONNECT_S).close()  # torch would log each failure with its stack
        return store_client(*self._endpoint, timeout_s=RENDEZVOUS_S)

    def _announce(self, store: "TCPStore") -> list[object]:
        own = [self._nodes.ranks_per_node, self._nodes.num_nodes, self._job_id]
        place = [*own, platform.node(), os.getpid()]
        found = json.loads(store.compare_set(f"xorl/node/{self._nodes.node_rank}", "", json.dumps(place)))
        if found != place:
            raise _TakenError(f"--node-rank {self._nodes.node_rank} is taken by host {found[3]}")
        store.add("xorl/nodes", 1)
        return own

    def _wait(self, store: "TCPStore", stops: Sequence[int], deadline: float) -> bool:
        """Whether all launchers have arrived."""
        while store.add("xorl/nodes", 0) < self._nodes.num_nodes:
            if stops or time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def _compare(self, store: "TCPStore", own: list[object]) -> None:
        found = store.multi_get([f"xorl/node/{node}" for node in range(self._nodes.num_nodes)])
        for node, text in enumerate(found):
            *other, host, _ = json.loads(text)
            for flag, here, there in zip(("--nproc-per-node", "--nnodes", "--rdzv-id"), own, other, strict=True):
                if here != there:
                    if self._nodes.node_rank == 0:
                        time.sleep(TELL_S)  # the others also compare the flags, in the store of this process
                    raise ValueError(
                        f"{flag}: {here} on node {self._nodes.node_rank} ({platform.node()}), but {there} on node "
                        f"{node} ({host}); all hosts need the same"
                    )

    def _missed(self, reason: str) -> str:
        address, port = self._endpoint
        return (
            f"node {self._nodes.node_rank} of {self._nodes.num_nodes} did not meet the others at {address}:{port} "
            f"within {RENDEZVOUS_S:g} s. Start the same command on every host, with an address of node 0 that all "
            f"hosts reach (--master-addr) and a port that no firewall closes to them\n{reason}"
        )
