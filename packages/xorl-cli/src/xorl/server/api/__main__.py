"""The API process: `python -m xorl.server.api SETTINGS`, a file that ApiSettings wrote."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import uvicorn

from xorl.server.api.app import create_app
from xorl.server.api.settings import ApiSettings

# What a stopped process waits for polls that are open; they are answered by the next one.
_GOODBYE_S = 2


def main(settings_file: Path) -> None:
    """Serve until a signal says otherwise."""
    settings = ApiSettings.load(settings_file)
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s api %(name)s %(message)s", stream=sys.stderr
    )
    uvicorn.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_GOODBYE_S,
        h11_max_incomplete_event_size=65536,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
