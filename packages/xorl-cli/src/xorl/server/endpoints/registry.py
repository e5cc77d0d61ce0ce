"""The registered inference servers and their states. Kept in memory; the caller saves the states to disk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import httpx
from msgspec.structs import replace

from xorl.server.endpoint_queries import EndpointState
from xorl.server.endpoints.engine import EngineError, EngineKind, InferenceEngine, Info
from xorl.server.operations import Endpoint, SyncResult

PROBE_TIMEOUT_S = 10.0
ADAPTER_TIMEOUT_S = 300.0
# SGLang's name for the version of the weights that it was started with.
FIRST_VERSION = "default"
# The maximum number of adapters loaded on a server; beyond it, the least recently used one is unloaded.
MAX_ADAPTERS = 32
# All endpoints of a service must agree on these fields.
_COMMON_FIELDS = ("kind", "model_path", "quantization", "tp_size")

State = Literal["healthy", "unreachable", "disconnected", "failed"]


class EndpointRegistry:
    """Endpoints by host and port, in the order in which they were registered.

    `states` are the saved states of an earlier registry. `is_changed` is set by each change; the caller resets it when
    it saves the states. Only one task at a time may be in a method that changes states.

    A server that a failed sync left with mixed weights is `failed`: it is not used for sampling until a complete sync
    succeeds or it is removed. If weight_version is None, the server has the weights that it was started with.
    """

    def __init__(self, client: httpx.AsyncClient, states: Iterable[EndpointState] = ()) -> None:
        self._client = client
        self._states = {(state.endpoint.host, state.endpoint.port): state for state in states}
        self.is_changed = False
        self._adapters: dict[tuple[str, int], dict[str, str]] = {}
        self._turn = 0

    @property
    def states(self) -> list[EndpointState]:
        """The last known states of all endpoints."""
        return list(self._states.values())

    def engine(self, endpoint: Endpoint) -> InferenceEngine:
        """The client of an endpoint's server."""
        return InferenceEngine(self._client, endpoint.host, endpoint.port)

    async def add(self, endpoint: Endpoint) -> EndpointState:
        """Probe a server and register it. A server that is already registered is probed again and its entry updated.

        If the server reports a tp_size, that is its number of ranks. Raises EngineError if the server does not answer,
        if it is not compatible with the other endpoints, or if `sync_weights` is set and it cannot receive weights.
        """
        engine = self.engine(endpoint)
        await engine.check_health(timeout_s=PROBE_TIMEOUT_S)
        info = await engine.describe(timeout_s=PROBE_TIMEOUT_S)
        if info["kind"] == "vllm" and endpoint.sync_weights:
            raise EngineError(
                f"sync_weights: {endpoint.host}:{endpoint.port} is vLLM, which receives weights only through its own "
                "kind of communicator, whose id is sent as a pickle; add it with sync_weights false to sample from it, "
                "or use SGLang"
            )
        ranks = info.get("tp_size")
        if isinstance(ranks, int) and ranks > 1:
            endpoint = replace(endpoint, world_size=ranks)
        key = (endpoint.host, endpoint.port)
        for other, state in self._states.items():
            for name in _COMMON_FIELDS if other != key else ():
                if state.server_info.get(name) != info.get(name):
                    raise EngineError(
                        f"{name}: {endpoint.host}:{endpoint.port} has {info.get(name)!r}, and {other[0]}:{other[1]} "
                        f"{state.server_info.get(name)!r}; all endpoints of a service must agree"
                    )
        added = EndpointState(endpoint, "healthy", weight_version=_version(info), server_info=info)
        old = self._states.get(key)
        if old is not None and old.state == "failed":
            # It may have restarted since then, with clean weights, but there is no way to know.
            added = replace(added, state="failed", message=old.message)
        self._adapters.pop(key, None)
        self._store(added)
        return added

    def remove(self, host: str, port: int) -> bool:
        """Remove an endpoint; returns whether it was registered."""
        self._adapters.pop((host, port), None)
        found = self._states.pop((host, port), None)
        self.is_changed |= found is not None
        return found is not None

    async def check(self) -> list[EndpointState]:
        """Probe all endpoints that are not disconnected; returns the states of all."""
        await asyncio.gather(*(self._check(state) for state in self.states if state.state != "disconnected"))
        return self.states

    async def connect(self) -> list[EndpointState]:
        """Use disconnected endpoints again; probes all and returns their states."""
        for state in self.states:
            if state.state == "disconnected":
                self._store(replace(state, state="unreachable", message=""))
        return await self.check()

    def disconnect(self) -> list[EndpointState]:
        """Stop using all endpoints until `connect`; failed ones stay failed."""
        for state in self.states:
            if state.state != "failed":
                self._store(replace(state, state="disconnected", message="disconnected by a client"))
        return self.states

    def receivers(self, *, after_step: bool = False) -> tuple[Endpoint, ...]:
        """The endpoints to send a model's weights to: all that can receive weights, or with `after_step` only those
        that were added with sync_weights. Includes failed ones, since a complete sync repairs them.
        """
        return tuple(
            state.endpoint
            for state in self.states
            if state.state in ("healthy", "failed")
            and state.server_info.get("kind") == "sglang"
            and (state.endpoint.sync_weights or not after_step)
        )

    def note_sync(self, result: SyncResult) -> None:
        """Record the result of a sync for each endpoint."""
        for synced in result.endpoints:
            state = self._states.get((synced.host, synced.port))
            if state is None:
                continue
            if synced.weights == "mixed":
                message = f"has a mixture of two versions of the weights and is paused: {synced.message}"
                self._store(replace(state, state="failed", message=message, weight_version=None))
            elif synced.weights == "new":
                version = result.weight_version
                self._store(replace(state, state="healthy", message=synced.message, weight_version=version))
                self._adapters.pop((synced.host, synced.port), None)

    def note_unexpected_weights(self, endpoint: Endpoint, version: str) -> None:
        """Record that an endpoint has another version than the last one sent to it, for example after a restart."""
        state = self._states.get((endpoint.host, endpoint.port))
        if state is not None:
            message = f"has weights of version {version}, which this service did not send; add it again to use it"
            self._store(replace(state, weight_version=version, message=message))
            self.forget_adapters(endpoint)

    def forget_adapters(self, endpoint: Endpoint) -> None:
        """Assume that an endpoint lost its adapters; they are loaded again when requests need them."""
        self._adapters.pop((endpoint.host, endpoint.port), None)

    def note_unreachable(self, endpoint: Endpoint, reason: str) -> None:
        """Record that an endpoint did not answer; `check` notices when it does again."""
        state = self._states.get((endpoint.host, endpoint.port))
        if state is not None and state.state == "healthy":
            self._store(replace(state, state="unreachable", message=reason))

    def next_for_sampling(self, version: str | None) -> EndpointState | None:
        """The next healthy endpoint, round robin, with this version of the weights (None: those it started with)."""
        candidates = [state for state in self.states if state.state == "healthy" and state.weight_version == version]
        if not candidates:
            return None
        self._turn += 1
        return candidates[self._turn % len(candidates)]

    async def load_adapter(self, state: EndpointState, name: str, folder: Path) -> None:
        """Load the adapter in `folder` under `name` unless it is loaded; replaces another adapter of that name.

        The name must include a version if adapters change, since servers may reuse values cached for a name.
        Raises EngineError.
        """
        endpoint = state.endpoint
        loaded = self._adapters.setdefault((endpoint.host, endpoint.port), {})
        if loaded.get(name) == str(folder):
            loaded[name] = loaded.pop(name)
            return
        kind: EngineKind = "vllm" if state.server_info.get("kind") == "vllm" else "sglang"
        engine = self.engine(endpoint)
        for evicted in [name] if name in loaded else list(loaded)[: max(len(loaded) - MAX_ADAPTERS + 1, 0)]:
            del loaded[evicted]
            await engine.unload_adapter(kind, evicted, timeout_s=ADAPTER_TIMEOUT_S)
        try:
            await engine.load_adapter(kind, name, str(folder.resolve()), timeout_s=ADAPTER_TIMEOUT_S)
        except EngineError as error:
            # An earlier process loaded it. That is fine, since a name always refers to the same folder.
            if "already" not in str(error):
                raise
        loaded[name] = str(folder)

    async def publish_adapter(self, name: str, folder: Path) -> list[EndpointState]:
        """Load an adapter on every healthy server and return their states. Raises EngineError if one fails."""
        healthy = [state for state in self.states if state.state == "healthy"]
        await asyncio.gather(*(self.load_adapter(state, name, folder) for state in healthy))
        return healthy

    async def _check(self, state: EndpointState) -> None:
        engine = self.engine(state.endpoint)
        try:
            await engine.check_health(timeout_s=PROBE_TIMEOUT_S)
            found: tuple[State, str] = ("healthy", "")
        except EngineError as error:
            found = ("unreachable", str(error))
        now = self._states.get((state.endpoint.host, state.endpoint.port))
        if now is None or now.state in ("failed", "disconnected") or (now.state, now.message) == found:
            return
        self._store(replace(now, state=found[0], message=found[1]))

    def _store(self, state: EndpointState) -> None:
        self._states[state.endpoint.host, state.endpoint.port] = state
        self.is_changed = True


def _version(info: Info) -> str | None:
    """The version of the server's current weights; None for the weights that it was started with."""
    version = info.get("weight_version")
    return None if version in (None, FIRST_VERSION) else str(version)
