"""Starts the ranks of a job on this host, passes signals on to them, and reports the job's first failure."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import FrameType

from xorl.cli.exit_codes import BY_SIGNAL, ERROR_PREFIX, FAILURE, exit_code_text
from xorl.cli.failures import failure_of, recorded_pids, recorded_stop, report
from xorl.cli.hosts import Hosts, HostsError
from xorl.cli.signals import exit_if_stuck
from xorl.core.launched import store_in
from xorl.host.ranks import Nodes, Ranks
from xorl.host.signals import DUPLICATE_S, STOP_SIGNALS
from xorl.host.temporary import temporary_folder

DEFAULT_PORT = 29500  # torchrun's
RANK_FOLDER_FLAG = "--rank-folder"
ENDING_SIGNALS = (signal.SIGHUP, signal.SIGQUIT)  # end the ranks at once


@dataclass(frozen=True)
class LaunchFlags:
    """The launcher flags of the command line, with the names that torchrun uses; None if not given."""

    nproc_per_node: int | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None

    def given(self) -> tuple[str, ...]:
        """Returns the names of the flags that were given, as written on the command line."""
        return tuple(
            f"--{field.name.replace('_', '-')}" for field in fields(self) if getattr(self, field.name) is not None
        )


@dataclass(frozen=True)
class LaunchPlan:
    """The ranks to start on this node. `endpoint` is where the nodes meet; None for a single node, which uses files."""

    nproc_per_node: int
    nnodes: int = 1
    node_rank: int = 0
    endpoint: tuple[str, int] | None = None
    job_id: str = "none"

    @property
    def nodes(self) -> Nodes:
        return Nodes(self.nproc_per_node, self.nnodes, self.node_rank)

    @property
    def world_size(self) -> int:
        return self.nodes.world_size

    def torchrun_line(self, arguments: Sequence[str], *, module: str = "xorl.cli.train") -> str:
        """Returns the torchrun command that would start the same ranks, with a rendezvous that unpickles nothing."""
        flags = [f"--nproc-per-node={self.nproc_per_node}"]
        if self.endpoint is not None:
            flags += [f"--nnodes={self.nnodes}", f"--node-rank={self.node_rank}"]
            flags += [f"--master-addr={self.endpoint[0]}", f"--master-port={self.endpoint[1]}"]
        return shlex.join(["torchrun", *flags, "-m", module, *arguments])


def plan_launch(flags: LaunchFlags, *, num_gpus: int, is_single_process: bool) -> LaunchPlan | None:
    """Plans the ranks to start: by default one per GPU of this node, or a single one without GPUs.

    Returns None if no launcher is needed. `is_single_process` says that the configuration uses a single process. Raises
    ValueError for inconsistent flags.
    """
    default_nproc = 1 if is_single_process else max(num_gpus, 1)
    nproc = default_nproc if flags.nproc_per_node is None else flags.nproc_per_node
    nnodes = 1 if flags.nnodes is None else flags.nnodes
    if nproc < 1 or nnodes < 1:
        raise ValueError(f"--nproc-per-node and --nnodes must be at least 1, got {nproc} and {nnodes}")
    if 0 < num_gpus < nproc:
        raise ValueError(
            f"--nproc-per-node {nproc}: this machine has only {num_gpus} GPUs; start at most one rank per GPU"
        )
    if not flags.given() and nproc == 1:
        return None
    if flags.rdzv_backend or flags.rdzv_endpoint or flags.rdzv_id:
        flags = _as_static(flags, nproc, nnodes)
    if nnodes > 1 or flags.master_addr or flags.master_port or flags.node_rank is not None:
        return _plan_static(flags, nproc, nnodes)
    return LaunchPlan(nproc)


def _as_static(flags: LaunchFlags, nproc: int, nnodes: int) -> LaunchFlags:
    """Converts --rdzv-endpoint of a static rendezvous to the equivalent --master-addr and --master-port."""
    if flags.master_addr or flags.master_port:
        raise ValueError("--rdzv-endpoint replaces --master-addr and --master-port: do not pass both")
    if not flags.rdzv_endpoint:
        raise ValueError("--rdzv-backend and --rdzv-id need --rdzv-endpoint HOST:PORT")
    backend = flags.rdzv_backend or "c10d"
    if backend != "static":
        given = [f"--nproc-per-node={nproc}", f"--nnodes={nnodes}", f"--rdzv-backend={backend}"]
        given += [f"--rdzv-endpoint={flags.rdzv_endpoint}", f"--rdzv-id={flags.rdzv_id or 'none'}"]
        raise ValueError(
            f"--rdzv-backend {backend}: torch's dynamic rendezvous runs the code that anyone writes to its port, so "
            "xorl does not start it. Give each host its index, and all of them the address of host 0: --node-rank 0 "
            "--master-addr 10.0.0.1. In a network that is closed to others, torchrun can start the ranks: "
            f"{shlex.join(['torchrun', *given])} -m xorl.cli.train CONFIG"
        )
    if flags.node_rank is None:
        raise ValueError(f"--rdzv-backend static needs --node-rank, from 0 to {nnodes - 1}")
    address, colon, port = flags.rdzv_endpoint.rpartition(":")
    if not colon or not port.isdecimal():
        raise ValueError(f"--rdzv-endpoint {flags.rdzv_endpoint}: expected HOST:PORT")
    return replace(flags, master_addr=address.strip("[]"), master_port=int(port))


def _plan_static(flags: LaunchFlags, nproc: int, nnodes: int) -> LaunchPlan:
    if nnodes > 1 and not flags.master_addr:
        raise ValueError(f"--nnodes {nnodes} needs --master-addr, the address of node 0")
    if nnodes > 1 and flags.node_rank is None:
        raise ValueError(f"--nnodes {nnodes} needs --node-rank, the index of this node, from 0 to {nnodes - 1}")
    node_rank = flags.node_rank or 0
    if not 0 <= node_rank < nnodes:
        raise ValueError(f"--node-rank {node_rank}: with --nnodes {nnodes} it must be from 0 to {nnodes - 1}")
    port = flags.master_port or DEFAULT_PORT
    if not 0 < port < 2**16:
        raise ValueError(f"--master-port {port}: a port must be from 1 to 65535")
    # One host needs no address that others reach, as in a Slurm job of one node.
    endpoint = ((flags.master_addr or "127.0.0.1") if nnodes > 1 else "127.0.0.1", port)
    return LaunchPlan(nproc, nnodes, node_rank, endpoint, flags.rdzv_id or "none")


def launch(plan: LaunchPlan, command: Sequence[str]) -> int:
    """Runs `python -u *command` as every rank of this node, waits, and returns the job's exit code.

    Prints the first failure of the job and returns its exit code. SIGTERM, SIGINT and SIGUSR1 are forwarded to the
    ranks, which may take some time to save; a second signal ends them. RANK_FOLDER_FLAG tells a rank where to leave
    notes for the launcher.
    """
    signals = _Signals()
    with temporary_folder() as (notes, _), _forwarding_signals(notes, plan.nproc_per_node, signals):
        hosts = None
        if plan.endpoint is None:
            variables = store_in(notes)
        else:
            hosts = Hosts(plan.nodes, plan.endpoint, plan.job_id)
            try:
                hosts.rendezvous(signals.stops)
            except HostsError as error:
                print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
                return FAILURE
            variables = hosts.variables
        if signals.stops:
            code = BY_SIGNAL + signals.stops[0]
            print(exit_code_text(code), file=sys.stderr)
            return code
        text, code = _run(plan, [*command, RANK_FOLDER_FLAG, str(notes)], variables, notes, signals)
        if text:
            print(text, file=sys.stderr)
            if hosts is not None:
                hosts.tell(text)
        return code


@dataclass
class _Signals:
    """The signals that were passed on to the ranks, and those that end them. `first_s` is when the first one came."""

    forwarded: list[int] = field(default_factory=list)
    first_s: float = 0.0
    stops: list[int] = field(default_factory=list)


def _run(
    plan: LaunchPlan, command: Sequence[str], variables: Mapping[str, str], notes: Path, signals: _Signals
) -> tuple[str, int]:
    """Runs the ranks; returns the report of a failure, "" if there is none, and the job's exit code."""
    records = notes / "records"
    records.mkdir()
    with Ranks(command, plan.nodes, variables, records) as ranks:
        exits = ranks.wait(signals.stops)
    failures = [failure_of(each.rank, each.exit_code, each.record, each.seen_s) for each in exits]
    # Ranks may be told to end, after a failure or a second signal, before they handle the forwarded signal.
    stop = ranks.stopped_by
    if not stop and signals.forwarded and failures and all(failure.was_stopped for failure in failures):
        stop = signals.forwarded[0]
    if stop:
        return exit_code_text(BY_SIGNAL + stop), BY_SIGNAL + stop
    return report(failures, plan.world_size) if failures else ("", recorded_stop(notes))


@contextmanager
def _forwarding_signals(notes: Path, num_ranks: int, signals: _Signals) -> Iterator[None]:
    """While entered, forwards the first signal to the ranks.

    A second signal ends the ranks, and so does the first one if some ranks are not ready for signals yet. A signal
    within DUPLICATE_S after the first one is a copy of it.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if signals.forwarded and now - signals.first_s < DUPLICATE_S:
            return
        signals.first_s = signals.first_s or now
        if signals.forwarded or len(pids := recorded_pids(notes)) < num_ranks:
            signals.stops.append(number)
        else:
            for pid in pids:
                with suppress(ProcessLookupError):  # the end of a rank is noticed elsewhere
                    os.kill(pid, number)
                    os.kill(pid, signal.SIGCONT)  # a rank that is stopped could not save
        signals.forwarded.append(number)

    def end(number: int, frame: FrameType | None) -> None:
        signals.stops.append(number)

    previous = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    previous |= {number: signal.signal(number, end) for number in ENDING_SIGNALS}
    try:
        with exit_if_stuck(lambda: bool(signals.forwarded)):  # a name may be looked up in native code
            yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
