"""The orchestrator: journals requests, orders them, dispatches them to the workers, and stores their results."""

from xorl.server.orchestrator.options import OrchestratorOptions
from xorl.server.orchestrator.orchestrator import Orchestrator

__all__ = ["Orchestrator", "OrchestratorOptions"]
