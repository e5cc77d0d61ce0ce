"""Registered inference servers: their addresses and states, and sampling from them. Does not import torch."""

from xorl.server.endpoints.destinations import Destinations, DestinationTransport
from xorl.server.endpoints.engine import EngineError
from xorl.server.endpoints.forwarding import sample_from_endpoint
from xorl.server.endpoints.registry import EndpointRegistry

__all__ = ["DestinationTransport", "Destinations", "EndpointRegistry", "EngineError", "sample_from_endpoint"]
