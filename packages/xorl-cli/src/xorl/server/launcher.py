"""Starts the service and keeps it running: `python -m xorl.server.launcher --mode auto --config config.yaml`.

The launcher starts the workers, the orchestrator and the API, and restarts each when it dies or hangs. To lose nothing,
it first stops the API, which accepts requests, then the orchestrator, which saves the models, and finally the workers.
`xorl serve` runs the same code.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Literal, NamedTuple, get_args
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from pydantic import Secret

from xorl.config import LoadedServerConfig, ServerConfig, load_server_config
from xorl.config.overrides import split_overrides
from xorl.config.server import TOKEN_PREFIX, num_workers
from xorl.config.show import show
from xorl.host.lock import FolderInUseError, lock_within
from xorl.host.signals import DUPLICATE_S
from xorl.host.temporary import temporary_folder
from xorl.server.addresses import (
    KEYS_FILE,
    address_from_this_host,
    bind_address,
    channel_keys,
    connect_address,
    service_folder,
    workers_file,
)
from xorl.server.channel.wire import is_loopback
from xorl.server.hangs import HangWatch, silence_s
from xorl.server.machine import check_machine
from xorl.server.orchestrator.options import read_model_config
from xorl.server.process import GRACE_S, configure_logging, is_running
from xorl.server.restarts import RESTARTS_FILE, write_restarts
from xorl.server.supervise import BAD_INPUT, ProcessFailed, Supervised

logger = logging.getLogger(__name__)

Mode = Literal["auto", "connect"]

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 5555  # to which xorl-client connects by default
TOKEN_FILE = "api_token"
LOCK_FILE = "lock"
# The exit code if another service has locked the output_dir, as in `xorl.cli.exit_codes`.
FOLDER_IN_USE = 4
ORIGINS_FILE = "origins.json"
POLL_EVERY_S = 0.1
HEALTH_EVERY_S = 0.5
SAVE_TIMEOUT_S = 1800.0  # for the orchestrator to save every model
STOP_TIMEOUT_S = 30.0
LEFTOVER_TIMEOUT_S = GRACE_S + 20.0  # for the processes of a killed launcher to end
DRIVER = Path("/proc/driver/nvidia/version")
COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
CHILD = ("-u", "-m", "xorl.server.process")


@dataclass(frozen=True)
class Plan:
    """The processes to start and their addresses. num_workers: 0 if the workers already run.

    workers_file: the file in which restarted workers publish their address, if it can differ from workers_address.
    """

    config: ServerConfig
    config_file: Path
    num_workers: int
    workers_bind: str
    workers_address: str
    workers_file: Path | None
    keys_file: Path | None
    orchestrator_address: str
    api_host: str
    api_port: int

    @property
    def restarts_file(self) -> Path:
        """The file in which the launcher reports restarts to the orchestrator."""
        return self.config_file.with_name(RESTARTS_FILE)

    @property
    def signs(self) -> Path:
        """The folder in which the processes leave signs of life."""
        return self.config_file.with_name("signs")

    @property
    def url(self) -> str:
        """The API's URL for clients on this host."""
        host = DEFAULT_HOST if self.api_host in ("0.0.0.0", "::") else self.api_host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.api_port}"

    def processes(self, *inherited_fds: int) -> list[Supervised]:
        """The processes in the order in which they start; inherited_fds stay open in all of them."""
        keys = [] if self.keys_file is None else ["--keys", str(self.keys_file)]
        files = ["--restarts-file", str(self.restarts_file)]
        files += [] if self.workers_file is None else ["--workers-file", str(self.workers_file)]
        limit_s = silence_s(self.config)
        common = ["--config", str(self.config_file)]
        common += [] if limit_s is None else ["--signs", str(self.signs)]

        def watch(*names: str, takes_notice: bool = False) -> HangWatch | None:
            return None if limit_s is None else HangWatch(self.signs, names, limit_s, takes_notice)

        workers = Supervised(
            "workers",
            [
                *(sys.executable, *CHILD, "xorl.server.ranks", str(self.num_workers), "-m", "xorl.server.worker"),
                *(
                    *common,
                    "--origins",
                    str(self.config_file.with_name(ORIGINS_FILE)),
                    "--bind",
                    self.workers_bind,
                    *keys,
                ),
            ],
            # Idle OpenMP threads must not spin on cores that the other processes need.
            environment={"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")},
            # Workers start slowly, and a request that kills them is retried up to worker_max_retries times.
            early_exit_s=60.0,
            max_early_exits=self.config.worker_max_retries + 3,
            inherited_fds=inherited_fds,
            hangs=watch(*(f"rank {rank}" for rank in range(self.num_workers)), takes_notice=True),
        )
        orchestrator = Supervised(
            "orchestrator",
            [
                *(sys.executable, *CHILD, "xorl.server.orchestrator", *common),
                *("--bind", self.orchestrator_address, "--workers", self.workers_address, *files, *keys),
            ],
            inherited_fds=inherited_fds,
            hangs=watch("orchestrator"),
        )
        api = Supervised(
            "API",
            [
                *(sys.executable, *CHILD, "xorl.server.api", *common),
                *("--orchestrator", self.orchestrator_address),
                *("--host", self.api_host, "--port", str(self.api_port)),
            ],
            inherited_fds=inherited_fds,
            hangs=watch("API"),
        )
        return [*([workers] if self.num_workers else []), orchestrator, api]


def serve(path: Path, overrides: Sequence[str], *, mode: Mode, api_host: str, api_port: int) -> int:
    """Run the service until a signal stops it; returns the exit code.

    Raises ValueError for errors that the user can fix, before any process starts.
    """
    loaded = load_server_config(path, overrides)
    configure_logging("launcher", loaded.config.log_level)
    if (line := loaded.without_effect_line()) is not None:
        logger.warning("%s", line)
    with ExitStack() as stack:
        lock = stack.enter_context(lock_output_dir(service_folder(loaded.config)))
        check_listening("--api", api_host, api_port)
        loaded, token_file = with_token(loaded, api_host)
        folder = stack.enter_context(temporary_folder())
        with loaded.citing():
            check_model(loaded.config)
        config_file = folder.path / "config.yaml"
        config_file.touch(mode=0o600)
        config_file.write_text(show(loaded, with_secrets=True), encoding="utf-8")
        gpus = 0
        if mode == "auto":
            gpus = count_gpus()
            with loaded.citing():
                check_machine(loaded.config, gpus)
        loaded.write_origins(config_file.with_name(ORIGINS_FILE))
        with loaded.citing():
            plan = make_plan(loaded.config, config_file, gpus, mode=mode, api_host=api_host, api_port=api_port)
        plan.signs.mkdir()
        lock.write(f"{os.getpid()} {plan.url}\n")
        lock.flush()
        return _supervise(plan, plan.processes(lock.fileno(), folder.lock), token_file)


def make_plan(
    config: ServerConfig, config_file: Path, num_gpus: int, *, mode: Mode, api_host: str, api_port: int
) -> Plan:
    """Decide what to start. `config_file` is the resolved configuration; sockets are created beside it."""
    folder = config_file.parent
    count = 0
    if mode == "auto":
        if config.engine_connect_host is not None and config.worker_bind_address == "auto":
            raise ValueError(
                "engine_connect_host: with --mode auto the workers are on this host and are reached by ipc; leave it "
                "at null, or also set worker_bind_address"
            )
        count = _count_workers(config, num_gpus)
        bind = bind_address(config, folder)
        if bind.startswith("tcp://"):
            host, _, port = bind.removeprefix("tcp://").rpartition(":")
            check_listening("worker_bind_address", host.strip("[]"), int(port))
        address = address_from_this_host(config, bind)
        has_keys = channel_keys(config, bind) is not None
    else:
        bind = ""
        address, has_keys = connect_address(config, config.worker_connection_timeout)
    return Plan(
        config=config,
        config_file=config_file,
        num_workers=count,
        workers_bind=bind,
        workers_address=address,
        workers_file=workers_file(config) if mode == "connect" else None,
        keys_file=service_folder(config) / KEYS_FILE if has_keys else None,
        orchestrator_address=f"ipc://{folder / 'orchestrator'}",
        api_host=api_host,
        api_port=api_port,
    )


def check_model(config: ServerConfig) -> None:
    """Raise ValueError, naming the option, if the model's config.json cannot be found or read.

    The workers check whether its model type is supported.
    """
    option = "model_path" if config.config_path in (None, config.model_path) else "config_path"
    path = str(config.config_path or config.model_path)
    try:
        model_config = read_model_config(path)
    except json.JSONDecodeError as error:
        raise ValueError(f"{option}: the config.json of {path} is not JSON: {error}") from error
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{option}: {path} is neither a folder with a config.json nor a model that can be loaded from the Hub: "
            f"{reason}"
        ) from error
    if not isinstance(model_config, dict) or "model_type" not in model_config:
        raise ValueError(f"{option}: the config.json of {path} has no model_type; choose the folder of a model")


def count_gpus() -> int:
    """The number of GPUs, counted by torch in another process, so that this one does not load torch."""
    if not DRIVER.exists():
        return 0
    counted = subprocess.run([sys.executable, "-c", COUNT_GPUS], capture_output=True, text=True, check=False)
    if counted.returncode != 0:
        raise RuntimeError(f"torch cannot be loaded to count the GPUs: {counted.stderr.strip()}")
    return int(counted.stdout)


def check_listening(option: str, host: str, port: int) -> None:
    """Raise ValueError, naming the option, if this host cannot listen on host:port.

    option: a configuration option, or `--api` for the flags --api-host and --api-port.
    """
    host_option, port_option = ("--api-host", "--api-port") if option == "--api" else (option, option)
    if not 0 < port < 2**16:
        raise ValueError(f"{port_option}: a port must be from 1 to 65535, got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ValueError(f"{host_option}: {host} is not a valid address: {error}") from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except PermissionError as error:
            raise ValueError(
                f"{port_option}: this user may not listen on port {port} ({error}); choose another port"
            ) from error
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ValueError(
                    f"{port_option}: port {port} of {host} is in use: stop the process that listens there, or choose "
                    "another port"
                ) from error
            raise ValueError(f"{host_option}: this machine cannot listen on {host}: {error}") from error


def with_token(loaded: LoadedServerConfig, api_host: str) -> tuple[LoadedServerConfig, str | None]:
    """The configuration with the token that clients must send, and the token's file if it was generated.

    A loopback address needs no token, unless the configuration sets one.
    """
    if loaded.config.api_token is not None or is_loopback(api_host):
        return loaded, None
    file = service_folder(loaded.config) / TOKEN_FILE
    if file.exists():
        token = file.read_text(encoding="ascii").strip()
        if not token.startswith(TOKEN_PREFIX):
            raise ValueError(
                f"api_token: {file} does not contain a token that begins with {TOKEN_PREFIX}: remove it to generate a "
                "new one"
            )
    else:
        token = TOKEN_PREFIX + secrets.token_urlsafe(32)
        file.touch(mode=0o600)
        file.write_text(f"{token}\n", encoding="ascii")
    config = loaded.config.model_copy(update={"api_token": Secret(token)})
    return replace(loaded, config=config), str(file)


def lock_output_dir(folder: Path) -> IO[str]:
    """Lock output_dir for this service: two services would overwrite each other's files.

    The processes of the service inherit the lock. If a launcher was killed, this waits for its processes to end.
    Raises ValueError if another service is running.
    """
    file = (folder / LOCK_FILE).open("a+", encoding="utf-8")

    def taken() -> str:
        holder = _holder(file)
        who = "on another host, or just starting" if holder is None else f"process {holder.pid}, {holder.url}"
        return f"output_dir: another service has locked {folder.parent} ({who})"

    def may_end() -> bool:
        holder = _holder(file)
        return holder is not None and not is_running(holder.pid)

    advice = "stop it, or choose another --server.output_dir"
    try:
        lock_within(LEFTOVER_TIMEOUT_S, file, taken, advice=advice, may_end=may_end)
    except OSError as error:
        file.close()
        raise ValueError(
            f"output_dir: {folder.parent} cannot be locked ({error.strerror}), so a second service could overwrite its "
            "files: choose a folder on a file system that supports locks"
        ) from error
    except ValueError:
        file.close()
        raise
    file.truncate(0)
    return file


class Holder(NamedTuple):
    """The holder of an output_dir's lock: the launcher's process id and the URL of its API."""

    pid: int
    url: str


def _holder(file: IO[str]) -> Holder | None:
    """The holder as written in the lock file; None if it has not written it yet."""
    file.seek(0)
    parts = file.read().split()
    return Holder(int(parts[0]), parts[1]) if len(parts) == len(Holder._fields) else None


def _count_workers(config: ServerConfig, gpus: int) -> int:
    count = num_workers(config, gpus)
    if gpus and count > gpus:
        raise ValueError(
            f"data_parallel_shard_size: the product of the parallel sizes is {count} workers, but this machine has "
            f"{gpus} GPUs: reduce the sizes, or start workers on several hosts and run this with --mode connect"
        )
    if count < gpus:
        logger.warning(
            "event=gpus_idle workers=%d gpus=%d: the parallel sizes use fewer GPUs than there are; "
            "data_parallel_shard_size: -1 uses all",
            count,
            gpus,
        )
    return count


def _supervise(plan: Plan, processes: Sequence[Supervised], token_file: str | None) -> int:
    """Start all processes and keep them running until a signal arrives or one fails for good; then stop all."""
    stop = threading.Event()
    stop_now = threading.Event()
    first_signal: float | None = None

    def on_signal(number: int, frame: object) -> None:
        nonlocal first_signal
        now = time.monotonic()
        if first_signal is None:
            first_signal = now
            stop.set()
        elif now - first_signal > DUPLICATE_S:
            stop_now.set()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    code = 0
    statuses = [process.status for process in processes]
    write_restarts(plan.restarts_file, statuses)
    try:
        for process in processes:
            process.start()
        ready = threading.Thread(target=_log_when_ready, args=(plan, stop, token_file), name="xorl-ready", daemon=True)
        ready.start()
        while not stop.wait(POLL_EVERY_S):
            for process in processes:
                process.kill_if_hung()
                process.restart_if_dead()
            latest = [process.status for process in processes]
            if latest != statuses:
                with suppress(OSError):  # a full disk, perhaps; the status page alone needs it, in a later round
                    write_restarts(plan.restarts_file, latest)
                    statuses = latest
    except ProcessFailed as error:
        logger.error("event=giving_up %s", error)
        code = error.code if error.code == BAD_INPUT else 1
    finally:
        stop.set()
        stop_all(processes, stop_now)
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code


def stop_all(processes: Sequence[Supervised], stop_now: threading.Event) -> None:
    """Stop the processes in reverse order. Once `stop_now` is set, kill them without waiting."""
    logger.info("event=stopping")
    for process in reversed(processes):
        process.signal(signal.SIGTERM)
        deadline = time.monotonic() + (SAVE_TIMEOUT_S if process.name == "orchestrator" else STOP_TIMEOUT_S)
        while not process.wait(POLL_EVERY_S) and time.monotonic() < deadline and not stop_now.is_set():
            # Otherwise the orchestrator would wait for the hung workers.
            for other in processes:
                other.kill_if_hung()
        process.kill()
    logger.info("event=stopped")


def _log_when_ready(plan: Plan, stop: threading.Event, token_file: str | None) -> None:
    """Wait until the service accepts training calls, then log its URL and where the token is."""
    opener = build_opener(ProxyHandler({}))
    started = time.monotonic()
    while not stop.wait(HEALTH_EVERY_S):
        try:
            with opener.open(f"{plan.url}/api/v1/healthz", timeout=5) as answer:
                if answer.status == 200:
                    break
        except (URLError, OSError):
            continue
    else:
        return
    config = plan.config
    key = f"key_in={token_file}" if token_file else "key=as_configured" if config.api_token else "key=none_needed"
    logger.info(
        "event=ready url=%s model=%s workers=%s after_s=%.1f %s",
        plan.url,
        config.model_name,
        plan.num_workers or "connected",
        time.monotonic() - started,
        key,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the launcher and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m xorl.server.launcher", description=serve.__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the service")
    parser.add_argument(
        "--mode", choices=get_args(Mode), default="auto", help="start workers, or connect to running ones"
    )
    parser.add_argument("--api-host", default=DEFAULT_HOST, help="address that the API listens on")
    parser.add_argument("--api-port", type=int, default=DEFAULT_PORT, help="port of the API")
    overrides, rest = split_overrides(sys.argv[1:] if arguments is None else arguments)
    flags = parser.parse_args(rest)
    try:
        return serve(flags.config, overrides, mode=flags.mode, api_host=flags.api_host, api_port=flags.api_port)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return FOLDER_IN_USE if isinstance(error, FolderInUseError) else BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
