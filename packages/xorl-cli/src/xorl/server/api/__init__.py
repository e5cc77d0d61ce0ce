"""The service's HTTP side: what both clients call, checked at the door and handed on. No torch here."""

from xorl.server.api.app import create_app
from xorl.server.api.settings import ApiSettings

__all__ = ["ApiSettings", "create_app"]
