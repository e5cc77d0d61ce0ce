"""Inference servers that the service knows: which there are, how they are, and sampling from them. No torch here."""

from xorl.server.endpoints.engine import EngineError
from xorl.server.endpoints.forwarding import EndpointSampler
from xorl.server.endpoints.registry import EndpointRegistry

__all__ = ["EndpointRegistry", "EndpointSampler", "EngineError"]
