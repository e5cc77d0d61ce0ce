"""`xorl serve config.yaml` starts the service; `xorl serve status` prints the status of a running one.

The configuration is validated before the service is imported.
"""

import json
import re
from enum import Enum
from pathlib import Path
from typing import Annotated
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

import typer

from xorl.cli.arguments import ServiceOverridesCommand
from xorl.config import load_server_config
from xorl.config.environment import SERVICE_KEYS, service_key

STATUS = Path("status")
STATUS_PATH = "/status.json"
TIMEOUT_S = 10.0

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class Mode(Enum):
    """Whether the launcher starts workers, or connects to running ones."""

    auto = "auto"
    connect = "connect"


@app.command(name="serve", cls=ServiceOverridesCommand)
def serve_command(
    ctx: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG|status", help="YAML file of the service, or status.")],
    mode: Annotated[Mode, typer.Option(help="Start workers (auto), or connect to running ones (connect).")] = Mode.auto,
    api_host: Annotated[
        str, typer.Option(help="Address that the API listens on. Non-loopback addresses need a key.")
    ] = ("127.0.0.1"),
    api_port: Annotated[int, typer.Option(help="Port of the API.")] = 5555,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="For status: file with the service's key, such as OUTPUT_DIR/service/api_token. "
            f"[the environment variable {' or '.join(SERVICE_KEYS)}]"
        ),
    ] = None,
) -> None:
    """Serve training and sampling to clients, such as tinker's and xorl-client.

    Any option of the configuration can be overridden: --server.seed 7. `xorl config docs --service` lists them.
    `xorl serve status` prints sessions, queue and throughput of a running service.
    """
    if config == STATUS and not config.is_file():
        key = service_key() if api_key_file is None else read_key(api_key_file)
        typer.echo(status_text(f"http://{api_host}:{api_port}", key))
        return
    if api_key_file is not None:
        raise ValueError(
            "--api-key-file is for `xorl serve status`; set the key of a service with its option api_token"
        )
    load_server_config(config, tuple(ctx.obj))
    from xorl.server.launcher import serve  # noqa: PLC0415  (slow; after validation)

    raise typer.Exit(
        serve(
            config,
            tuple(ctx.obj),
            mode="auto" if mode is Mode.auto else "connect",
            api_host=api_host,
            api_port=api_port,
        )
    )


def read_key(file: Path) -> str:
    """Reads a key from a file. Raises ValueError if the file is missing or empty."""
    try:
        key = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--api-key-file: cannot read {file}: {error}") from error
    if not key:
        raise ValueError(f"--api-key-file: {file} is empty; it must contain the key of a service")
    return key


def status_text(url: str, api_key: str | None) -> str:
    """Returns the status of a service as indented JSON. Raises ValueError if it is unreachable or rejects the key."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with build_opener(ProxyHandler({})).open(
            Request(url + STATUS_PATH, headers=headers), timeout=TIMEOUT_S
        ) as response:
            status = json.load(response)
    except HTTPError as error:
        hint = f"; pass the service's key with --api-key-file or {SERVICE_KEYS[0]}" if error.code in (401, 403) else ""
        raise ValueError(f"{url} returned status {error.code}{hint}") from error
    except (URLError, OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"cannot reach a service at {url} ({error}): start one with `xorl serve config.yaml`, or set --api-host "
            "and --api-port"
        ) from error
    # Put each list of numbers on one line. This is safe, since JSON strings contain no line breaks.
    return re.sub(r'\[\n[^][{}"]*\]', lambda numbers: " ".join(numbers[0].split()), json.dumps(status, indent=2))
