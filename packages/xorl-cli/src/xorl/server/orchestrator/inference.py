"""Inference endpoints: remembers them across restarts, samples from those with the right weights, sends weights."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec

from xorl.server.endpoint_queries import (
    AddEndpoint,
    ConnectEndpoints,
    DisconnectEndpoints,
    Endpoints,
    EndpointState,
    ListEndpoints,
    RemoveEndpoint,
    SetSyncQuantization,
)
from xorl.server.endpoints import (
    Destinations,
    DestinationTransport,
    EndpointRegistry,
    EngineError,
    sample_from_endpoint,
)
from xorl.server.identifiers import CheckpointRef, checkpoint_folder
from xorl.server.messages import Ok, Rejected
from xorl.server.operations import (
    BaseSampler,
    BlockFp8,
    CheckpointSampler,
    Endpoint,
    Sample,
    SampleResult,
    SamplerRef,
    SyncResult,
    SyncWeights,
)
from xorl.server.orchestrator.commit import JournalError
from xorl.server.orchestrator.journal import Journal, Record, decoded
from xorl.server.orchestrator.options import OrchestratorOptions
from xorl.server.orchestrator.registry import ModelRecord, Registry, checkpoint_key

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 10.0
# Enough for a hundred clients with some samples each in flight.
MAX_CONNECTIONS = 2048


class Added(msgspec.Struct, frozen=True):
    """An endpoint's record in the journal: the request that registered it, with its sync settings, and its state."""

    asked: AddEndpoint
    state: EndpointState


class _RequiredWeights(NamedTuple):
    """The weights that an endpoint must hold to sample: see `sample_from_endpoint`."""

    version: str | None = None
    adapter: tuple[str, Path] | None = None


class Inference:
    """The orchestrator's inference endpoints. Use it, and `close` it, in the orchestrator's event loop."""

    def __init__(self, options: OrchestratorOptions, journal: Journal, registry: Registry) -> None:
        self._options = options
        self._journal = journal
        self._registry = registry
        trusted = [one.endpoint.host for one in options.endpoints]
        destinations = Destinations(options.allowed_inference_hosts, trusted)
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=100)
        # A redirect could lead to any address.
        transport = DestinationTransport(destinations, limits)
        self._client = httpx.AsyncClient(transport=transport, trust_env=False, follow_redirects=False)
        read_added = msgspec.msgpack.Decoder(Added).decode
        records = journal.records("endpoint")
        saved = [decoded(read_added, body, f"the record of endpoint {name!r}") for name, body in records]
        self._settings = {_address(added.state.endpoint): added.asked for added in saved}
        self._endpoints = EndpointRegistry(self._client, [added.state for added in saved])
        self._lock = asyncio.Lock()
        self._unregistered = [one for one in options.endpoints if _address(one.endpoint) not in self._settings]
        read_fp8 = msgspec.msgpack.Decoder(BlockFp8).decode
        quantizations = [
            decoded(read_fp8, body, "the quantization of syncs") for _, body in journal.records("sync_quantization")
        ]
        self._quantization = quantizations[0] if quantizations else None

    @property
    def can_sample(self) -> bool:
        """Whether any endpoint is healthy, and so may hold the weights of a sample."""
        return any(state.state == "healthy" for state in self._endpoints.states)

    @property
    def states(self) -> list[EndpointState]:
        """The last known states of all endpoints."""
        return self._endpoints.states

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def watch(self) -> None:
        """Register configured endpoints once they answer, and check all of them regularly, until cancelled."""
        while True:
            for settings in list(self._unregistered):
                async with self._lock:
                    try:
                        await self._endpoints.add(settings.endpoint)
                        self._settings[_address(settings.endpoint)] = settings
                        self._unregistered.remove(settings)
                    except EngineError as problem:
                        logger.warning("event=endpoint_missing why=%r", str(problem))
            async with self._lock:
                await self._endpoints.check()
                try:
                    await self._save_changes()
                except JournalError as problem:
                    logger.error("event=endpoints_not_kept why=%r", str(problem))
            await asyncio.sleep(CHECK_EVERY_S)

    # --- queries ---

    async def add(self, query: AddEndpoint) -> EndpointState | Rejected:
        """Register an endpoint, if it answers."""
        async with self._lock:
            try:
                state = await self._endpoints.add(query.endpoint)
                # Only now: if it does not answer, an endpoint that is already registered must keep its settings.
                self._settings[_address(query.endpoint)] = query
            except EngineError as problem:
                return Rejected(400, str(problem))
            await self._save_changes()
        return state

    async def remove(self, query: RemoveEndpoint) -> Ok | Rejected:
        """Remove an endpoint."""
        async with self._lock:
            if not self._endpoints.remove(query.host, query.port):
                return Rejected(404, f"no endpoint {query.host}:{query.port} is registered")
            await self._save_changes()
        return Ok()

    async def list_all(self, query: ListEndpoints) -> Endpoints:
        """All endpoints in their last known state."""
        return Endpoints(self._endpoints.states)

    async def connect(self, query: ConnectEndpoints) -> Endpoints:
        """Check all endpoints now and use those that answer."""
        async with self._lock:
            states = await self._endpoints.connect()
            await self._save_changes()
        return Endpoints(states)

    async def disconnect(self, query: DisconnectEndpoints) -> Endpoints:
        """Stop using the endpoints until `connect`."""
        async with self._lock:
            states = self._endpoints.disconnect()
            await self._save_changes()
        return Endpoints(states)

    # --- weights ---

    async def set_quantization(self, query: SetSyncQuantization) -> Ok:
        """Set the quantization of syncs that do not specify one."""
        body = None if query.quantization is None else msgspec.msgpack.encode(query.quantization)
        async with self._lock:
            await self._journal.put([Record("sync_quantization", "", body)])
            self._quantization = query.quantization
        return Ok()

    def complete(self, operation: SyncWeights, model: ModelRecord, *, after_step: bool) -> SyncWeights | None:
        """Fill in a sync's receivers, version and quantization; returns None if no endpoint receives weights."""
        endpoints = operation.endpoints
        if endpoints is None:
            endpoints = self._endpoints.receivers(after_step=after_step)
        if not endpoints:
            return None
        version = operation.weight_version or weights_version(model)
        operation = msgspec.structs.replace(
            operation,
            endpoints=endpoints,
            weight_version=version,
            quantization=operation.quantization or self._quantization,
        )
        settings = self._settings.get(_address(endpoints[0]))
        if not after_step or settings is None:
            return operation
        return msgspec.structs.replace(
            operation,
            master_address=settings.master_address,
            master_port=settings.master_port,
            group_name=settings.group_name,
            buffer_size_mb=settings.buffer_size_mb,
        )

    @property
    def syncs_after_steps(self) -> bool:
        """Whether any endpoint receives weights after each step."""
        return bool(self._endpoints.receivers(after_step=True))

    async def note_sync(self, result: SyncResult) -> None:
        """Update the endpoints' states after a sync."""
        async with self._lock:
            self._endpoints.note_sync(result)
            await self._save_changes()

    # --- sampling ---

    async def publish(self, checkpoint: CheckpointRef, name: str) -> Rejected | None:
        """Have the endpoints load a sampler's adapter under `name`, by which a client will request it from them."""
        if not (self._options.enable_lora and self.can_sample and checkpoint.kind == "sampler_weights"):
            return None
        folder = checkpoint_folder(self._options.folder, checkpoint)
        async with self._lock:
            try:
                await self._endpoints.publish_adapter(name, folder)
            except EngineError as problem:
                return Rejected(502, str(problem))
        return None

    async def sample(self, operation: Sample, context_length: int | None) -> SampleResult | None:
        """Sample from an endpoint; returns None if the workers must sample instead. context_length: of the model."""
        required = self._required_weights(operation.sampler)
        if required is None:
            return None
        try:
            return await sample_from_endpoint(
                self._endpoints,
                operation,
                version=required.version,
                context_length=context_length,
                adapter=required.adapter,
            )
        except EngineError as problem:
            # Engines do not support everything that the workers do, such as adapters on the head or large ranks.
            logger.warning("event=endpoint_refused_sample taken_by=workers why=%r", str(problem))
            return None

    def _required_weights(self, sampler: SamplerRef) -> _RequiredWeights | None:
        """The weights that an endpoint must hold to sample in place of the workers; None if none can hold them."""
        match sampler:
            case BaseSampler():
                return _RequiredWeights()
            case CheckpointSampler(checkpoint=checkpoint):
                record = self._registry.checkpoints.get(checkpoint_key(checkpoint))
                if record is None or record.version is None:
                    return None
                if not self._options.enable_lora:
                    return _RequiredWeights(version=record.version)
                if checkpoint.kind != "sampler_weights":
                    return None
                # Servers cache by adapter name, so the name must be unique to these weights.
                name = re.sub("[^A-Za-z0-9._-]", "-", record.version)
                return _RequiredWeights(adapter=(name, checkpoint_folder(self._options.folder, checkpoint)))
            case _:
                return None

    async def _save_changes(self) -> None:
        """Write changed endpoints to the journal. If that fails, the next call tries again."""
        if not self._endpoints.is_changed:
            return
        self._endpoints.is_changed = False
        states = {_address(state.endpoint): state for state in self._endpoints.states}
        removed = [address for address in self._settings if address not in states]
        records = [Record("endpoint", f"{host}:{port}", None) for host, port in removed]
        for (host, port), state in states.items():
            body = msgspec.msgpack.encode(Added(self._settings[host, port], state))
            records.append(Record("endpoint", f"{host}:{port}", body))
        try:
            await self._journal.put(records)
        except JournalError:
            self._endpoints.is_changed = True
            raise


def _address(endpoint: Endpoint) -> tuple[str, int]:
    return endpoint.host, endpoint.port


def weights_version(model: ModelRecord) -> str:
    """The version of a model's current weights, unique among the weights of all models."""
    return f"{model.lane}-{model.num_steps}-{model.weights_id}"
