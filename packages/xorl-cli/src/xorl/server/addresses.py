"""How the orchestrator finds the workers: at a configured address, or at one that they published in output_dir.

A channel that other machines can reach needs keys. They are generated once and stored in output_dir, readable only by
this user.
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

SERVICE_FOLDER = "service"  # in output_dir: files that the service's processes share
WORKERS_FILE = "workers.json"
KEYS_FILE = "channel.keys"
POLL_EVERY_S = 0.2
ANY_HOST = ("0.0.0.0", "*", "[::]")


def service_folder(config: ServerConfig) -> Path:
    """`{output_dir}/service`, created for this user only if it does not exist.

    Raises ValueError, naming the option, if it cannot be created.
    """
    folder = Path(config.output_dir) / SERVICE_FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise ValueError(f"output_dir: the service cannot write there: {error}; choose another folder") from error
    return folder


def bind_address(config: ServerConfig, folder: Path | None) -> str:
    """The address on which the first worker listens.

    folder: a private folder for an ipc socket, if all workers run on one host; None if they run on several hosts.
    """
    if config.worker_bind_address != "auto":
        return config.worker_bind_address
    if folder is not None:
        return f"ipc://{folder / 'workers'}"
    return f"tcp://{config.worker_bind_host}:{config.worker_bind_port}"


def channel_keys(config: ServerConfig, address: str) -> ChannelKeys | None:
    """The keys of a channel at this address, generated if they do not exist yet; None if it does not need keys.

    Raises ValueError, naming the option, if the address cannot be used.
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
    """Publish the address on which this process, the first worker, listens, and whether it uses keys."""
    file = service_folder(config) / WORKERS_FILE
    temporary = file.with_suffix(".tmp")
    has_keys = channel_keys(config, address) is not None
    content = {"address": with_reachable_host(address, socket.gethostname()), "has_keys": has_keys}
    temporary.write_text(json.dumps(content))
    temporary.replace(file)


def workers_file(config: ServerConfig) -> Path | None:
    """The file in which running workers publish their address; None if the options give the address."""
    is_configured = config.engine_connect_host is not None or config.worker_bind_address != "auto"
    return None if is_configured else service_folder(config) / WORKERS_FILE


def connect_address(config: ServerConfig, timeout_s: float) -> tuple[str, bool]:
    """The address of running workers and whether their channel uses keys, from the options or as they published it.

    The published address may be left over from earlier workers; if nothing answers there, use `read_published`.
    Raises ValueError if no address is published within timeout_s.
    """
    file = workers_file(config)
    if file is None:
        bound = bind_address(config, None)
        return address_from_this_host(config, bound), channel_keys(config, bound) is not None
    deadline = time.monotonic() + timeout_s
    while not file.exists():
        if time.monotonic() > deadline:
            raise ValueError(
                f"engine_connect_host: null, and no worker has written {file} within worker_connection_timeout "
                f"({timeout_s:g} s): start the workers with the same output_dir, or set the host of the first one"
            )
        time.sleep(POLL_EVERY_S)
    content = json.loads(file.read_text())
    return str(content["address"]), bool(content["has_keys"])


def read_published(file: Path) -> tuple[str, ChannelKeys | None] | None:
    """The address and keys of the workers that last wrote `file`; None if it is missing or unreadable."""
    try:
        content = json.loads(file.read_text())
        keys = ChannelKeys.load(file.with_name(KEYS_FILE)) if content["has_keys"] else None
        address = str(content["address"])
        check_address(address, keys)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("event=workers_file_unread file=%s why=%r", file, str(error))
        return None
    return address, keys


def address_from_this_host(config: ServerConfig, address: str) -> str:
    """The address to which a process on this host connects, given the address on which the workers listen."""
    host = config.engine_connect_host
    return with_reachable_host(address, host or "127.0.0.1", always=host is not None)


def with_reachable_host(address: str, host: str, *, always: bool = False) -> str:
    """A tcp address with `host` in place of a wildcard such as 0.0.0.0; with `always`, in place of any host."""
    if not address.startswith("tcp://"):
        return address
    listening, _, port = address.removeprefix("tcp://").rpartition(":")
    return f"tcp://{host}:{port}" if always or listening in ANY_HOST else address
