"""Which inference servers there are and how they are. Pure state over probes: keeping it on disk is the caller's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import httpx
from msgspec.structs import replace

from xorl.server.endpoints.engine import EngineError, EngineKind, InferenceEngine, Info
from xorl.server.operations import Endpoint, SyncResult
from xorl.server.queries import EndpointState

PROBE_TIMEOUT_S = 10.0
ADAPTER_TIMEOUT_S = 300.0
# What SGLang calls the weights that it was started with.
FIRST_VERSION = "default"
# Of adapters that stay loaded on a server; the one that was not asked for longest leaves for another.
MAX_ADAPTERS = 32
# Servers that sample for the same clients must agree on these.
_SHARED = ("kind", "model_path", "quantization", "tp_size")

State = Literal["healthy", "unreachable", "disconnected", "failed"]


class EndpointRegistry:
    """Registered endpoints by host and port, in the order in which they were added.

    `states` are those of a registry before; it tells `changed` (None: no one) after each change, so that they can be
    kept. One task of one event loop may be in a call that changes something at a time.

    A server that a sync left with mixed weights is `failed`: it samples for no one until it is removed, or a whole sync
    has mended it. weight_version None: it holds what it was started with.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        states: Iterable[EndpointState] = (),
        changed: Callable[[], None] | None = None,
    ) -> None:
        self._client = client
        self._states = {(state.endpoint.host, state.endpoint.port): state for state in states}
        self._changed = changed or (lambda: None)
        self._adapters: dict[tuple[str, int], dict[str, str]] = {}
        self._turn = 0

    @property
    def states(self) -> list[EndpointState]:
        """All of them, as they were found last."""
        return list(self._states.values())

    def engine(self, endpoint: Endpoint) -> InferenceEngine:
        """What to ask it by."""
        return InferenceEngine(self._client, endpoint.host, endpoint.port)

    async def add(self, endpoint: Endpoint) -> EndpointState:
        """Ask a server how it is and register it; one that is registered already is asked again and takes its place.

        The server's own tp_size is its number of ranks where it says one. Raises EngineError where it does not answer,
        where it differs from the others in what all must share, and where it is to be sent weights and takes none.
        """
        engine = self.engine(endpoint)
        await engine.check_health(timeout_s=PROBE_TIMEOUT_S)
        kind, info = await engine.describe(timeout_s=PROBE_TIMEOUT_S)
        if kind == "vllm" and endpoint.sync_weights:
            raise EngineError(
                f"sync_weights: {endpoint.host}:{endpoint.port} is vLLM, which takes weights only from a communicator "
                "of its own kind, whose id travels as a pickle; add it with sync_weights false to sample from it, or "
                "use SGLang"
            )
        ranks = info.get("tp_size")
        if isinstance(ranks, int) and ranks > 1:
            endpoint = replace(endpoint, world_size=ranks)
        key = (endpoint.host, endpoint.port)
        for other, state in self._states.items():
            for name in _SHARED if other != key else ():
                if state.server_info.get(name) != info.get(name):
                    raise EngineError(
                        f"{name}: {endpoint.host}:{endpoint.port} has {info.get(name)!r}, and {other[0]}:{other[1]} "
                        f"{state.server_info.get(name)!r}; endpoints of one service are alike"
                    )
        added = EndpointState(endpoint, "healthy", weight_version=_version(info), server_info=info)
        old = self._states.get(key)
        if old is not None and old.state == "failed":
            # Whether it was started anew since no one can tell.
            added = replace(added, state="failed", message=old.message)
        self._adapters.pop(key, None)
        self._put(added)
        return added

    def remove(self, host: str, port: int) -> bool:
        """Whether it was registered; now it is not."""
        self._adapters.pop((host, port), None)
        found = self._states.pop((host, port), None)
        if found is not None:
            self._changed()
        return found is not None

    async def check(self) -> list[EndpointState]:
        """Ask all how they are, but for those that are disconnected, and return them."""
        await asyncio.gather(*(self._check(state) for state in self.states if state.state != "disconnected"))
        return self.states

    async def connect(self) -> list[EndpointState]:
        """Use all of them again, and ask them how they are."""
        for state in self.states:
            if state.state == "disconnected":
                self._put(replace(state, state="unreachable", message=""))
        return await self.check()

    def disconnect(self) -> list[EndpointState]:
        """Use none of them until `connect`; one with mixed weights stays marked."""
        for state in self.states:
            if state.state != "failed":
                self._put(replace(state, state="disconnected", message="disconnected by a client"))
        return self.states

    def receivers(self, *, after_step: bool = False) -> tuple[Endpoint, ...]:
        """Where a model's weights go: all that take any, or after a step those that were added with sync_weights.

        Those that failed are among them, since a whole sync mends them.
        """
        return tuple(
            state.endpoint
            for state in self.states
            if state.state in ("healthy", "failed")
            and state.server_info.get("kind") == "sglang"
            and (state.endpoint.sync_weights or not after_step)
        )

    def note_sync(self, result: SyncResult) -> None:
        """What became of each endpoint in a sync."""
        for synced in result.endpoints:
            state = self._states.get((synced.host, synced.port))
            if state is None:
                continue
            if synced.weights == "mixed":
                message = f"holds parts of two versions and is paused: {synced.message}"
                self._put(replace(state, state="failed", message=message, weight_version=None))
            elif synced.weights == "new":
                version = result.weight_version
                self._put(replace(state, state="healthy", message=synced.message, weight_version=version))
                self._adapters.pop((synced.host, synced.port), None)

    def note_other_weights(self, endpoint: Endpoint, version: str) -> None:
        """It answered with weights of another version than it was sent last, as one does that was started anew."""
        state = self._states.get((endpoint.host, endpoint.port))
        if state is not None:
            message = f"holds weights of version {version}, which were not sent to it; add it again to use it"
            self._put(replace(state, weight_version=version, message=message))
            self.forget_adapters(endpoint)

    def forget_adapters(self, endpoint: Endpoint) -> None:
        """Load adapters again when they are asked for: it may have lost them."""
        self._adapters.pop((endpoint.host, endpoint.port), None)

    def note_unreachable(self, endpoint: Endpoint, why: str) -> None:
        """It did not answer; `check` finds out when it does again."""
        state = self._states.get((endpoint.host, endpoint.port))
        if state is not None and state.state == "healthy":
            self._put(replace(state, state="unreachable", message=why))

    def sampling(self, version: str | None) -> EndpointState | None:
        """One in turn that holds these weights (None: those it was started with); None where there is none."""
        able = [state for state in self.states if state.state == "healthy" and state.weight_version == version]
        if not able:
            return None
        self._turn += 1
        return able[self._turn % len(able)]

    async def load_adapter(self, state: EndpointState, name: str, folder: Path) -> None:
        """Let a server load the adapter in `folder` under `name`, unless it has it; another of that name goes first.

        Names must say which version it is where adapters change: what a server computed for a name may be used again.
        Raises EngineError.
        """
        endpoint = state.endpoint
        loaded = self._adapters.setdefault((endpoint.host, endpoint.port), {})
        if loaded.get(name) == str(folder):
            loaded[name] = loaded.pop(name)
            return
        kind: EngineKind = "vllm" if state.server_info.get("kind") == "vllm" else "sglang"
        engine = self.engine(endpoint)
        for leaving in [name] if name in loaded else list(loaded)[: max(len(loaded) - MAX_ADAPTERS + 1, 0)]:
            del loaded[leaving]
            await engine.unload_adapter(kind, leaving, timeout_s=ADAPTER_TIMEOUT_S)
        try:
            await engine.load_adapter(kind, name, str(folder.resolve()), timeout_s=ADAPTER_TIMEOUT_S)
        except EngineError as error:
            # From before this process: a name stands for one folder as long as both live.
            if "already" not in str(error):
                raise
        loaded[name] = str(folder)

    async def publish_adapter(self, name: str, folder: Path) -> list[EndpointState]:
        """Load an adapter on every healthy server; returns those. Raises EngineError where one of them does not."""
        able = [state for state in self.states if state.state == "healthy"]
        await asyncio.gather(*(self.load_adapter(state, name, folder) for state in able))
        return able

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
        self._put(replace(now, state=found[0], message=found[1]))

    def _put(self, state: EndpointState) -> None:
        self._states[state.endpoint.host, state.endpoint.port] = state
        self._changed()


def _version(info: Info) -> str | None:
    """Of the weights that it holds now; None for those that it was started with."""
    said = info.get("weight_version")
    return None if said in (None, FIRST_VERSION) else str(said)
