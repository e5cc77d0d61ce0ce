"""`python -m xorl.server.api`: runs the API's process until a signal ends it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from xorl.config import load_server_config
from xorl.server.api.app import create_app
from xorl.server.api.context import ApiSettings
from xorl.server.process import configure_logging

# How long a stopping process waits for open polls; clients poll again, and the next process answers.
_SHUTDOWN_GRACE_S = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve the API until a signal ends it."""
    parser = argparse.ArgumentParser(prog="python -m xorl.server.api", description=main.__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the service's configuration, resolved")
    parser.add_argument("--orchestrator", required=True, help="address that the orchestrator listens on")
    parser.add_argument("--host", required=True, help="address to listen on")
    parser.add_argument("--port", type=int, required=True, help="port to listen on")
    parser.add_argument("--signs", type=Path, help="folder for signs of life")
    flags = parser.parse_args(arguments)
    config = load_server_config(flags.config, []).config
    configure_logging("api", config.log_level)
    settings = ApiSettings(
        flags.orchestrator,
        flags.host,
        flags.port,
        token=None if config.api_token is None else config.api_token.get_secret_value(),
        body_bytes=int(config.max_request_mb * 10**6),
        signs=flags.signs,
    )
    uvicorn.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
        h11_max_incomplete_event_size=65536,
    )


if __name__ == "__main__":
    sys.exit(main())
