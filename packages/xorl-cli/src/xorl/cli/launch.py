"""Starts the ranks of a job on this node with torch.distributed's launcher."""

import json
import logging
import os
import platform
import shlex
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from types import FrameType

from xorl.cli.exit_codes import BY_SIGNAL, ERROR_PREFIX, FAILURE, exit_code_text
from xorl.cli.failures import failure_of, recorded_pids, recorded_stop, report
from xorl.cli.signals import exit_if_stuck
from xorl.host.failures import LostRankError
from xorl.host.signals import STOP_SIGNALS
from xorl.host.temporary import temporary_folder

DEFAULT_PORT = 29500  # torchrun's
RANK_FOLDER_FLAG = "--rank-folder"
RENDEZVOUS_S = 600  # how long the launchers of all hosts wait for each other
TELL_S = 5.0  # how long the other hosts have to read why this one failed
LEFT_TO_TORCH = (signal.SIGHUP, signal.SIGQUIT)


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
    """How many ranks to start on this node, and their rendezvous. `node_rank` is None if the rendezvous assigns it."""

    nproc_per_node: int
    nnodes: int
    rdzv_backend: str
    rdzv_endpoint: str
    rdzv_id: str
    node_rank: int | None
    is_standalone: bool

    @property
    def world_size(self) -> int:
        return self.nproc_per_node * self.nnodes

    def torchrun_line(self, arguments: Sequence[str], *, module: str = "xorl.cli.train") -> str:
        """Returns the torchrun command that would start the same ranks."""
        flags = [f"--nproc-per-node={self.nproc_per_node}"]
        if self.is_standalone:
            flags.insert(0, "--standalone")
        elif self.rdzv_backend == "static":
            address, _, port = self.rdzv_endpoint.rpartition(":")
            flags += [f"--nnodes={self.nnodes}", f"--node-rank={self.node_rank}"]
            flags += [f"--master-addr={address}", f"--master-port={port}"]
        else:
            flags += [f"--nnodes={self.nnodes}", f"--rdzv-backend={self.rdzv_backend}"]
            flags += [f"--rdzv-endpoint={self.rdzv_endpoint}", f"--rdzv-id={self.rdzv_id}"]
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
        return _plan_rendezvous(flags, nproc, nnodes)
    if nnodes > 1 or flags.master_addr or flags.master_port or flags.node_rank is not None:
        return _plan_static(flags, nproc, nnodes)
    return LaunchPlan(nproc, 1, "c10d", "localhost:0", uuid.uuid4().hex, None, is_standalone=True)


def _plan_rendezvous(flags: LaunchFlags, nproc: int, nnodes: int) -> LaunchPlan:
    if flags.master_addr or flags.master_port:
        raise ValueError("--rdzv-endpoint replaces --master-addr and --master-port: do not pass both")
    if not flags.rdzv_endpoint:
        raise ValueError("--rdzv-backend and --rdzv-id need --rdzv-endpoint HOST:PORT")
    backend = flags.rdzv_backend or "c10d"
    if backend == "static" and flags.node_rank is None:
        raise ValueError(f"--rdzv-backend static needs --node-rank, from 0 to {nnodes - 1}")
    return LaunchPlan(nproc, nnodes, backend, flags.rdzv_endpoint, flags.rdzv_id or "none", flags.node_rank, False)


def _plan_static(flags: LaunchFlags, nproc: int, nnodes: int) -> LaunchPlan:
    if nnodes > 1 and not flags.master_addr:
        raise ValueError(f"--nnodes {nnodes} needs --master-addr, the address of node 0, or --rdzv-endpoint")
    if nnodes > 1 and flags.node_rank is None:
        raise ValueError(f"--nnodes {nnodes} needs --node-rank, the index of this node, from 0 to {nnodes - 1}")
    node_rank = flags.node_rank or 0
    if not 0 <= node_rank < nnodes:
        raise ValueError(f"--node-rank {node_rank}: with --nnodes {nnodes} it must be from 0 to {nnodes - 1}")
    endpoint = f"{flags.master_addr or '127.0.0.1'}:{flags.master_port or DEFAULT_PORT}"
    return LaunchPlan(nproc, nnodes, "static", endpoint, "none", node_rank, False)


def launch(plan: LaunchPlan, command: Sequence[str]) -> int:
    """Runs `python -u *command` as every rank of this node, waits, and returns the job's exit code.

    Prints the first failure of the job and returns its exit code. SIGTERM, SIGINT and SIGUSR1 are forwarded to the
    ranks, which may take some time to save; a second signal ends them. RANK_FOLDER_FLAG tells a rank where to leave
    notes for the launcher.
    """
    # torch takes seconds to import, so the configuration is validated before.
    from torch.distributed import DistError  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.elastic.rendezvous import RendezvousError  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    def stop(number: int) -> None:
        raise SignalException(f"got signal {number}", sigval=signal.Signals(number))

    forwarded: list[int] = []
    _quieten_launcher()
    if plan.nproc_per_node > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in torchrun, so that ranks do not compete for cores
    with temporary_folder() as (notes, _):
        config = LaunchConfig(
            min_nodes=plan.nnodes,
            max_nodes=plan.nnodes,
            nproc_per_node=plan.nproc_per_node,
            run_id=plan.rdzv_id,
            role="rank",
            rdzv_backend=plan.rdzv_backend,
            rdzv_endpoint=plan.rdzv_endpoint,
            rdzv_configs={} if plan.node_rank is None else {"rank": plan.node_rank, "timeout": RENDEZVOUS_S},
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=str(notes / "records")),
            local_addr="localhost" if plan.is_standalone else None,
            signals_to_handle=",".join(number.name for number in LEFT_TO_TORCH),
        )
        try:
            with _forwarding_signals(notes, plan.nproc_per_node, stop, forwarded):
                elastic_launch(config, sys.executable)("-u", *command, RANK_FOLDER_FLAG, str(notes))
        except ChildFailedError as error:
            failures = [
                failure_of(rank, failure.exitcode, failure.error_file_data, failure.timestamp)
                for rank, failure in error.failures.items()
            ]
            text, code = report(failures, plan.world_size)
            if forwarded and all(failure.was_stopped for failure in failures):
                # torch's launcher stops the remaining ranks with its own signal, which may arrive before ours.
                code = BY_SIGNAL + forwarded[0]
                text = exit_code_text(code)
            print(text, file=sys.stderr)
            _tell_other_hosts(plan, text)
            return code
        except SignalException as error:
            code = BY_SIGNAL + error.sigval
            print(exit_code_text(code), file=sys.stderr)
            _tell_other_hosts(plan, exit_code_text(code))
            return code
        except (DistError, RendezvousError) as error:
            print(_rendezvous_failure(plan, error), file=sys.stderr)
            return FAILURE
        return recorded_stop(notes)


@contextmanager
def _forwarding_signals(
    notes: Path, num_ranks: int, stop: Callable[[int], None], forwarded: list[int]
) -> Iterator[None]:
    """While entered, forwards a signal to the ranks and appends it to `forwarded`.

    Calls `stop` for a second signal, and if some ranks are not ready for signals yet.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        forwarded.append(number)
        for other in STOP_SIGNALS:
            signal.signal(other, lambda number, frame: stop(number))
        pids = recorded_pids(notes)
        if len(pids) < num_ranks:
            stop(number)
        for pid in pids:
            with suppress(ProcessLookupError):  # torch's launcher notices ranks that have ended
                os.kill(pid, number)

    # torch's launcher does not restore the handlers that it replaces.
    previous = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, *LEFT_TO_TORCH)}
    for number in STOP_SIGNALS:
        signal.signal(number, forward)
    try:
        with exit_if_stuck(lambda: bool(forwarded)):  # torch waits in native code for the other hosts
            yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _rendezvous_failure(plan: LaunchPlan, error: Exception) -> str:
    """The message of a launcher that did not find the other hosts."""
    own = "this host" if plan.node_rank is None else f"node {plan.node_rank}"
    return (
        f"{ERROR_PREFIX}{own} of {plan.nnodes} did not meet the others at {plan.rdzv_endpoint} within {RENDEZVOUS_S} "
        "s. Start the same command on every host, with an address of node 0 that all hosts reach (--master-addr or "
        f"--rdzv-endpoint) and a port that no firewall closes\n{str(error).splitlines()[0]}"
    )


def _tell_other_hosts(plan: LaunchPlan, text: str) -> None:
    """Publishes why this host ends in the job's store, which the ranks of the other hosts watch."""
    if plan.nnodes == 1 or plan.rdzv_backend != "static":
        return  # with other backends, only the ranks know the address of the store
    # torch takes seconds to import, so the configuration is validated before.
    from torch.distributed import TCPStore  # noqa: PLC0415

    from xorl.core.join import FAILED  # noqa: PLC0415

    address, _, port = plan.rdzv_endpoint.rpartition(":")
    failure = json.dumps([LostRankError.__name__, f"node {plan.node_rank} ({platform.node()}) ended: {text}"])
    with suppress(RuntimeError, OSError):  # the store has ended with its host
        socket.create_connection((address, int(port)), TELL_S).close()  # torch would log a failure with its stack
        timeout = timedelta(seconds=TELL_S)
        store = TCPStore(address, int(port), is_master=False, timeout=timeout, wait_for_workers=False)
        store.compare_set(FAILED, "", failure)
        if plan.node_rank == 0:
            time.sleep(TELL_S)  # the store is in this process


def _quieten_launcher() -> None:
    """Silences the failure logs of torch's launcher, which would precede our own report.

    Users can request them with torch's environment variable LOGLEVEL.
    """
    if "LOGLEVEL" in os.environ:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
