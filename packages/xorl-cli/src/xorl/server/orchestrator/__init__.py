"""The process that knows every request: it journals requests, orders them, hands them to workers, keeps results."""

from xorl.server.orchestrator.options import OrchestratorOptions
from xorl.server.orchestrator.orchestrator import Orchestrator

__all__ = ["Orchestrator", "OrchestratorOptions"]
