"""The one process of the service that knows every request: it keeps, orders, hands out and remembers."""

from xorl.server.orchestrator.options import OrchestratorOptions
from xorl.server.orchestrator.orchestrator import Orchestrator

__all__ = ["Orchestrator", "OrchestratorOptions"]
