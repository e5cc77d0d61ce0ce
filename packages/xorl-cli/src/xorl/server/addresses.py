"""Where the orchestrator finds the workers: one address by the configuration, or the one that they have published.

Beyond this machine a channel has keys, which are made once and kept in output_dir, readable for this user alone.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from pathlib import Path

from xorl.config import ServerConfig
from xorl.server.channel import ChannelKeys, check_address

logger = logging.getLogger(__name__)

SERVICE_FOLDER = "service"  # in output_dir: what the processes of the service tell each other
WORKERS_FILE = "workers.json"
KEYS_FILE = "channel.keys"
LOOK_EVERY_S = 0.2
ANY_HOST = ("0.0.0.0", "*", "[::]")


def service_folder(config: ServerConfig) -> Path:
    """`{output_dir}/service`, made where it is not there, for this user alone.

    Raises ValueError that names the option where it cannot be.
    """
    folder = Path(config.output_dir) / SERVICE_FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise ValueError(f"output_dir: the service cannot write there: {error}; choose another folder") from error
    return folder


def bind_address(config: ServerConfig, folder: Path | None) -> str:
    """Where the first worker listens: an ipc socket in this private folder where all workers are on one host.

    folder: None where they are on several hosts.
    """
    if config.worker_bind_address != "auto":
        return config.worker_bind_address
    if folder is not None:
        return f"ipc://{folder / 'workers'}"
    return f"tcp://{config.worker_bind_host}:{config.worker_bind_port}"


def channel_keys(config: ServerConfig, address: str) -> ChannelKeys | None:
    """The keys that a channel at this address needs, made where there are none yet; None where it needs none.

    Raises ValueError that names the option where the address cannot be used.
    """
    keys: ChannelKeys | None = None
    file = service_folder(config) / KEYS_FILE
    try:
        check_address(address, None)
    except ValueError:
        if not address.startswith("tcp://"):
            raise
        if not file.exists():
            ChannelKeys.create().save(file)
        keys = ChannelKeys.load(file)
    option = "worker_bind_address" if address == config.worker_bind_address else "worker_bind_host"
    try:
        check_address(address, keys)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error
    return keys


def publish(config: ServerConfig, address: str) -> None:
    """Tell a launcher that connects where the first worker, this process, listens, and whether with keys."""
    file = service_folder(config) / WORKERS_FILE
    fresh = file.with_suffix(".tmp")
    has_keys = channel_keys(config, address) is not None
    place = {"address": reachable(address, socket.gethostname()), "has_keys": has_keys}
    fresh.write_text(json.dumps(place))
    fresh.replace(file)


def workers_file(config: ServerConfig) -> Path | None:
    """Where workers that run already say how they are reached; None where the options do."""
    is_told = config.engine_connect_host is not None or config.worker_bind_address != "auto"
    return None if is_told else service_folder(config) / WORKERS_FILE


def connect_address(config: ServerConfig, timeout_s: float) -> tuple[str, bool]:
    """Where workers that run already are reached, and whether with keys: by the options, or by what they published.

    What they published may be of earlier ones: look again (`published`) while nobody is reached there.
    Raises ValueError where they publish nothing within timeout_s.
    """
    file = workers_file(config)
    if file is None:
        bound = bind_address(config, None)
        return reached_from_here(config, bound), channel_keys(config, bound) is not None
    deadline = time.monotonic() + timeout_s
    while not file.exists():
        if time.monotonic() > deadline:
            raise ValueError(
                f"engine_connect_host: null, and no worker has written {file} within worker_connection_timeout, "
                f"{timeout_s:g} s: start the workers with the same output_dir, or name the host of the first one"
            )
        time.sleep(LOOK_EVERY_S)
    place = json.loads(file.read_text())
    return str(place["address"]), bool(place["has_keys"])


def published(file: Path) -> tuple[str, ChannelKeys | None] | None:
    """The address and the keys by which the workers that wrote `file` last are reached; None where it says none."""
    try:
        place = json.loads(file.read_text())
        keys = ChannelKeys.load(file.with_name(KEYS_FILE)) if place["has_keys"] else None
        address = str(place["address"])
        check_address(address, keys)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("event=workers_file_unread file=%s why=%r", file, str(error))
        return None
    return address, keys


def reached_from_here(config: ServerConfig, address: str) -> str:
    """The address by which a process on this host reaches who listens at `address`."""
    return reachable(address, config.engine_connect_host or "127.0.0.1", always=config.engine_connect_host is not None)


def reachable(address: str, host: str, *, always: bool = False) -> str:
    """A tcp address with `host` in place of one that stands for all interfaces; `always`, of any."""
    if not address.startswith("tcp://"):
        return address
    listening, _, port = address.removeprefix("tcp://").rpartition(":")
    return f"tcp://{host}:{port}" if always or listening in ANY_HOST else address
