"""Inference servers beside the workers: kept across restarts, sampled from where they hold the weights, and synced."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec

from xorl.server.endpoints import EndpointRegistry, EndpointSampler, EngineError
from xorl.server.identifiers import CheckpointRef, checkpoint_folder
from xorl.server.messages import Ok, Rejected
from xorl.server.operations import (
    BaseSampler,
    BlockFp8,
    CheckpointSampler,
    Sample,
    SampleResult,
    SamplerRef,
    SnapshotSampler,
    SyncResult,
    SyncWeights,
)
from xorl.server.orchestrator.commit import JournalError
from xorl.server.orchestrator.journal import Journal, Record, decoded
from xorl.server.orchestrator.options import OrchestratorOptions
from xorl.server.orchestrator.registry import ModelRecord, Registry, checkpoint_key
from xorl.server.queries import (
    AddEndpoint,
    ConnectEndpoints,
    DisconnectEndpoints,
    Endpoints,
    EndpointState,
    ListEndpoints,
    RemoveEndpoint,
    SetSyncQuantization,
)

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 10.0
# A hundred clients may each have some samples on their way.
MAX_CONNECTIONS = 2048


class Added(msgspec.Struct, frozen=True):
    """An endpoint as the journal keeps it, with how it is to be sent weights."""

    asked: AddEndpoint
    state: EndpointState


class _Weights(NamedTuple):
    """Weights that an endpoint has to hold: see `EndpointSampler.sample`."""

    version: str | None = None
    adapter: tuple[str, Path] | None = None


class Inference:
    """What the orchestrator has to do with inference servers; `start` and `close` in its loop."""

    def __init__(self, options: OrchestratorOptions, journal: Journal, registry: Registry) -> None:
        self._options = options
        self._journal = journal
        self._registry = registry
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=100)
        # Proxies are for the world outside; endpoints are named by who runs the service.
        self._client = httpx.AsyncClient(limits=limits, trust_env=False)
        read_added = msgspec.msgpack.Decoder(Added).decode
        records = journal.records("endpoint")
        kept = [decoded(read_added, body, f"the record of endpoint {name!r}") for name, body in records]
        self._asked = {_place(added.state): added.asked for added in kept}
        self._endpoints = EndpointRegistry(self._client, [added.state for added in kept], self._changed)
        self._sampler = EndpointSampler(self._endpoints)
        self._turn = asyncio.Lock()
        self._missing = [one for one in options.endpoints if (one.endpoint.host, one.endpoint.port) not in self._asked]
        self._is_stale = False
        read_fp8 = msgspec.msgpack.Decoder(BlockFp8).decode
        chosen = [
            decoded(read_fp8, body, "the quantization of syncs") for _, body in journal.records("sync_quantization")
        ]
        self._quantization = chosen[0] if chosen else None

    @property
    def can_sample(self) -> bool:
        """Whether any of them may have the weights that are to be sampled."""
        return any(state.state == "healthy" for state in self._endpoints.states)

    async def close(self) -> None:
        """Let go of connections."""
        await self._client.aclose()

    async def watch(self) -> None:
        """Add those of the configuration once they answer, and ask all how they are; until cancelled."""
        while True:
            for asked in list(self._missing):
                async with self._turn:
                    try:
                        await self._endpoints.add(asked.endpoint)
                        self._asked[asked.endpoint.host, asked.endpoint.port] = asked
                        self._missing.remove(asked)
                    except EngineError as problem:
                        logger.warning("event=endpoint_missing why=%r", str(problem))
            async with self._turn:
                await self._endpoints.check()
                try:
                    await self._keep()
                except JournalError as problem:
                    logger.error("event=endpoints_not_kept why=%r", str(problem))
            await asyncio.sleep(CHECK_EVERY_S)

    # --- queries ---

    async def add(self, ask: AddEndpoint) -> EndpointState | Rejected:
        """Register one that answers."""
        async with self._turn:
            try:
                state = await self._endpoints.add(ask.endpoint)
                # How one is sent weights that was there already holds on where it does not answer.
                self._asked[ask.endpoint.host, ask.endpoint.port] = ask
            except EngineError as problem:
                return Rejected(400, str(problem))
            await self._keep()
        return state

    async def remove(self, ask: RemoveEndpoint) -> Ok | Rejected:
        """Use one no more."""
        async with self._turn:
            if not self._endpoints.remove(ask.host, ask.port):
                return Rejected(404, f"no endpoint {ask.host}:{ask.port} is registered")
            await self._keep()
        return Ok()

    async def list_all(self, ask: ListEndpoints) -> Endpoints:
        """As they were found last."""
        return Endpoints(self._endpoints.states)

    async def connect(self, ask: ConnectEndpoints) -> Endpoints:
        """Use all of them again, as far as they answer."""
        async with self._turn:
            states = await self._endpoints.connect()
            await self._keep()
        return Endpoints(states)

    async def disconnect(self, ask: DisconnectEndpoints) -> Endpoints:
        """Use none of them for the time being."""
        async with self._turn:
            states = self._endpoints.disconnect()
            await self._keep()
        return Endpoints(states)

    # --- weights ---

    async def set_quantization(self, ask: SetSyncQuantization) -> Ok:
        """Of syncs that do not say it themselves."""
        body = None if ask.quantization is None else msgspec.msgpack.encode(ask.quantization)
        async with self._turn:
            await self._journal.put([Record("sync_quantization", "", body)])
            self._quantization = ask.quantization
        return Ok()

    def complete(self, operation: SyncWeights, model: ModelRecord, *, after_step: bool) -> SyncWeights | None:
        """A sync with its receivers, version and quantisation; None where nobody takes weights."""
        endpoints = operation.endpoints
        if endpoints is None:
            endpoints = self._endpoints.receivers(after_step=after_step)
        if not endpoints:
            return None
        version = operation.weight_version or version_of(model)
        operation = msgspec.structs.replace(
            operation,
            endpoints=endpoints,
            weight_version=version,
            quantization=operation.quantization or self._quantization,
        )
        asked = self._asked.get((endpoints[0].host, endpoints[0].port))
        if not after_step or asked is None:
            return operation
        return msgspec.structs.replace(
            operation,
            master_address=asked.master_address,
            master_port=asked.master_port,
            group_name=asked.group_name,
            buffer_size_mb=asked.buffer_size_mb,
        )

    @property
    def takes_steps(self) -> bool:
        """Whether an endpoint is to be sent weights after each step."""
        return bool(self._endpoints.receivers(after_step=True))

    async def note_sync(self, result: SyncResult) -> None:
        """What became of them in a sync."""
        async with self._turn:
            self._endpoints.note_sync(result)
            await self._keep()

    # --- sampling ---

    async def publish(self, checkpoint: CheckpointRef, name: str) -> Rejected | None:
        """Let all of them load a sampler's adapter under the name by which a client will ask them."""
        if not (self._options.enable_lora and self.can_sample and checkpoint.kind == "sampler_weights"):
            return None
        folder = checkpoint_folder(self._options.folder, checkpoint)
        async with self._turn:
            try:
                await self._endpoints.publish_adapter(name, folder)
            except EngineError as problem:
                return Rejected(502, str(problem))
        return None

    async def sample(self, operation: Sample, context_length: int | None) -> SampleResult | None:
        """The samples that an endpoint drew; None if the workers have to draw them. context_length: of the model."""
        wanted = self._weights_of(operation.sampler)
        if wanted is None:
            return None
        try:
            return await self._sampler.sample(
                operation, version=wanted.version, adapter=wanted.adapter, context_length=context_length
            )
        except EngineError as problem:
            # Engines lack what the workers have: adapters on heads, or rows of a rank.
            logger.warning("event=endpoint_refused_sample taken_by=workers why=%r", str(problem))
            return None

    def _weights_of(self, sampler: SamplerRef) -> _Weights | None:
        """The weights that an endpoint has to hold to sample in place of the workers; None if none can hold them."""
        match sampler:
            case BaseSampler():
                return _Weights()
            case SnapshotSampler():
                version = self._registry.samplers[sampler.sampler_id].version
                return None if version is None else _Weights(version=version)
            case CheckpointSampler(checkpoint=checkpoint):
                record = self._registry.checkpoints.get(checkpoint_key(checkpoint))
                if record is None or record.version is None:
                    return None
                if not self._options.enable_lora:
                    return _Weights(version=record.version)
                if checkpoint.kind != "sampler_weights":
                    return None
                # A name that no other weights ever have: a server may reuse what it computed for a name.
                name = re.sub("[^A-Za-z0-9._-]", "-", record.version)
                return _Weights(adapter=(name, checkpoint_folder(self._options.folder, checkpoint)))
            case _:
                return None

    def _changed(self) -> None:
        self._is_stale = True

    async def _keep(self) -> None:
        """What has changed, in the journal; where that takes nothing, the next call tries it again."""
        if not self._is_stale:
            return
        self._is_stale = False
        states = {_place(state): state for state in self._endpoints.states}
        gone = [place for place in self._asked if place not in states]
        records = [Record("endpoint", f"{host}:{port}", None) for host, port in gone]
        for (host, port), state in states.items():
            body = msgspec.msgpack.encode(Added(self._asked[host, port], state))
            records.append(Record("endpoint", f"{host}:{port}", body))
        try:
            await self._journal.put(records)
        except JournalError:
            self._is_stale = True
            raise


def _place(state: EndpointState) -> tuple[str, int]:
    return state.endpoint.host, state.endpoint.port


def version_of(model: ModelRecord) -> str:
    """Of a model's weights as they are now: no other weights ever have it, of any model."""
    return f"{model.lane}-{model.num_steps}-{model.weights_id}"
