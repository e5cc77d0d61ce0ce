"""Registered inference servers: their addresses and states, and sampling from them. Does not import torch."""

from xorl.server.endpoints.engine import EngineError
from xorl.server.endpoints.forwarding import EndpointSampler
from xorl.server.endpoints.registry import EndpointRegistry

__all__ = ["EndpointRegistry", "EndpointSampler", "EngineError"]
