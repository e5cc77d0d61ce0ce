"""Queries about inference endpoints that the orchestrator answers at once, and their answers; part of `queries`."""

from __future__ import annotations

from typing import Literal

import msgspec

from xorl.server.operations import BlockFp8, Endpoint, Message


class AddEndpoint(Message, frozen=True):
    """Register an endpoint if it answers; answered by EndpointState."""

    endpoint: Endpoint
    group_name: str = "weight_sync_group"
    master_address: str = ""
    master_port: int = 0
    buffer_size_mb: int = 1024


class RemoveEndpoint(Message, frozen=True):
    """Remove a registered endpoint; answered by Ok, or Rejected(404)."""

    host: str
    port: int


class ListEndpoints(Message, frozen=True):
    """Ask for the registered endpoints in their last known state; answered by Endpoints."""


class ConnectEndpoints(Message, frozen=True):
    """Check the registered endpoints now and use those that answer; answered by Endpoints."""

    master_address: str = ""
    master_port: int = 0
    group_name: str = "weight_sync_group"


class SetSyncQuantization(Message, frozen=True):
    """Set the default quantization of weight syncs; None sends the model's dtype. Answered by Ok."""

    quantization: BlockFp8 | None


class DisconnectEndpoints(Message, frozen=True):
    """Stop using the registered endpoints until ConnectEndpoints; answered by Endpoints."""


class EndpointState(Message, frozen=True):
    """A registered endpoint. state: a failed endpoint may hold a mixture of old and new weights, and is not used."""

    endpoint: Endpoint
    state: Literal["healthy", "unreachable", "disconnected", "failed"]
    message: str = ""
    weight_version: str | None = None
    server_info: dict[str, str | int | float | bool | None] = msgspec.field(default_factory=dict)


class Endpoints(Message, frozen=True):
    """Registered endpoints, in the order in which they were added."""

    endpoints: list[EndpointState]
