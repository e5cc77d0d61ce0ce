"""The service's HTTP API for both clients: validates requests and passes them to the orchestrator. Without torch."""

from xorl.server.api.app import create_app
from xorl.server.api.context import ApiSettings

__all__ = ["ApiSettings", "create_app"]
