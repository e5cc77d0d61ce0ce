"""Training over two hosts, each a network namespace with an address of its own and two ranks, as `xorl train` does it.

Skipped where namespaces may not be made.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tiny_runs import last_step, wait_for_step, write_quickstart_run

LIMIT_S = 120.0


@dataclass(frozen=True)
class Host:
    """A network namespace with a host name and an address."""

    namespace: str
    name: str
    address: str
    node_rank: int

    def start(self, folder: Path, *, num_ranks: int, interface: str | None = None) -> subprocess.Popen[str]:
        """Starts this host's part of the job; without `interface`, gloo uses the one that leads to node 0."""
        environment = os.environ | ({} if interface is None else {"GLOO_SOCKET_IFNAME": interface})
        train = [sys.executable, "-m", "xorl.cli.train", str(folder / "config.yaml")]
        ranks = ["--nproc-per-node", str(num_ranks), "--nnodes", "2", "--node-rank", str(self.node_rank)]
        script = f'hostname {self.name}; exec "$@"'
        command = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", script, "sh", *train, *ranks]
        return subprocess.Popen(
            [*command, "--master-addr", "10.77.0.1"], stderr=subprocess.PIPE, text=True, env=environment, cwd=folder
        )


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them."""
    made = tuple(
        Host(f"xorl-{secrets.token_hex(3)}", f"host-{index}", f"10.77.0.{index + 1}", index) for index in (0, 1)
    )
    try:
        for host in made:
            _ip("netns", "add", host.namespace)
        ends = [part for host in made for part in ("eth0", "netns", host.namespace)]
        _ip("link", "add", *ends[:3], "type", "veth", "peer", *ends[3:])
        for host in made:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _ip("-n", host.namespace, "link", "set", interface, "up")
        subprocess.run(["unshare", "--uts", "true"], check=True, capture_output=True)
        yield made
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces may not be made here: {getattr(error, 'stderr', None) or error}")
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "delete", host.namespace], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def job(hosts: tuple[Host, Host], tmp_path: Path) -> Iterator[Callable[..., list[subprocess.Popen[str]]]]:
    """Starts a job on both hosts; what is left of it ends with the test."""
    started: list[subprocess.Popen[str]] = []
    saves = {"save_steps": 5, "save_epochs": 0, "keep_last": 2, "load_checkpoint_path": "auto"}
    write_quickstart_run(tmp_path, data={"dataloader_num_workers": 0}, max_steps=1_000_000, **saves)

    def start(**options: object) -> list[subprocess.Popen[str]]:
        launchers = [host.start(tmp_path, **options) for host in hosts]  # pyright: ignore[reportArgumentType]
        started.extend(launchers)
        return launchers

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, stderr = process.communicate(timeout=LIMIT_S)
    return process.returncode, stderr


@pytest.mark.multi
def test_a_lost_host_is_named_and_both_hosts_continue_and_stop_together(tmp_path: Path, job) -> None:
    # Catches a host that goes on, or ends with a traceback of gloo, when another one is lost; a job that does not
    # resume on two hosts; and a signal to one host that the other does not hear of.
    launchers = job(num_ranks=2)
    wait_for_step(tmp_path / "output", 7, *launchers)
    launchers[1].kill()
    killed = time.monotonic()
    code, stderr = ended(launchers[0])
    assert time.monotonic() - killed < 40, stderr
    assert code == 1
    assert "Traceback" not in stderr
    assert (
        "error: the connection to rank 2 on host host-1 (10.77.0.2), rank 3 on host host-1 (10.77.0.2) was lost"
        in stderr
    )
    assert "run the same command again on all hosts" in stderr

    saved = int((tmp_path / "output" / "checkpoints" / "latest").read_text().strip().rpartition("_")[2])
    assert saved >= 5
    launchers = job(num_ranks=1)
    wait_for_step(tmp_path / "output", last_step(tmp_path / "output") + 3, *launchers)
    launchers[1].send_signal(signal.SIGTERM)
    results = [ended(launcher) for launcher in launchers]
    assert [code for code, _ in results] == [143, 143], results
    latest = (tmp_path / "output" / "checkpoints" / "latest").read_text().strip()
    assert latest == f"global_step_{last_step(tmp_path / 'output')}"


@pytest.mark.multi
def test_ranks_that_cannot_reach_each_other_say_which_address_was_tried(job) -> None:
    # Catches hosts that wait for each other for half an hour, since their addresses are loopback addresses.
    for code, stderr in map(ended, job(num_ranks=1, interface="lo")):
        assert code == 1, stderr
        assert (
            "rank 0 on host host-0 (127.0.0.1), rank 1 on host host-1 (127.0.0.1): only processes of the same host"
            in stderr
        )
        assert "set GLOO_SOCKET_IFNAME, and NCCL_SOCKET_IFNAME for GPUs" in stderr
        assert "Traceback" not in stderr
