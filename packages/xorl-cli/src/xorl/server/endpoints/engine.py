"""What an inference server is asked over HTTP, beside taking new weights: what it is, adapters, samples.

Two kinds are told apart by what they answer: SGLang and vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, cast

import httpx

EngineKind = Literal["sglang", "vllm"]
Info: TypeAlias = dict[str, str | int | float | bool | None]

# Of what a server says of itself, what decides whether it fits, and what clients show.
_KEPT = (
    "model_path",
    "served_model_name",
    "tp_size",
    "enable_lora",
    "max_lora_rank",
    "quantization",
    "kv_cache_dtype",
    "context_length",
    "version",
    "weight_version",
)


class EngineError(Exception):
    """A server that did not do what it was asked. is_gone: it does not answer at all."""

    def __init__(self, message: str, *, is_gone: bool = False) -> None:
        super().__init__(message)
        self.is_gone = is_gone


class InferenceEngine:
    """A server at `http://host:port`; every call raises EngineError where it does not do it.

    The client is shared and stays the caller's.
    """

    def __init__(self, client: httpx.AsyncClient, host: str, port: int) -> None:
        self._client = client
        self._base = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def check_health(self, *, timeout_s: float) -> None:
        """Whether it answers and is ready."""
        await self._request("GET", "/health", None, timeout_s)

    async def describe(self, *, timeout_s: float) -> tuple[EngineKind, Info]:
        """Which kind it is, and what it says of itself; `kind` is among that."""
        for path in ("/server_info", "/get_server_info"):
            said = await self._optional(path, timeout_s)
            if said is not None:
                return "sglang", {"kind": "sglang", **_kept(said)}
        said = await self._optional("/version", timeout_s)
        if said is None:
            raise EngineError(
                f"{self._base} answers neither /server_info, as SGLang does, nor /version, as vLLM does: other engines "
                "are not known"
            )
        models = await self._request("GET", "/v1/models", None, timeout_s)
        listed = models.get("data")
        first = listed[0] if isinstance(listed, list) and listed else {}
        path, length = first.get("root") or first.get("id"), first.get("max_model_len")
        own = {"model_path": path, "served_model_name": first.get("id"), "context_length": length}
        return "vllm", {"kind": "vllm", **_kept({**own, "version": said.get("version")})}

    async def load_adapter(self, kind: EngineKind, name: str, folder: str, *, timeout_s: float) -> None:
        """Load PEFT's files from a folder that the server sees too, under a name that is not taken."""
        path = "/load_lora_adapter" if kind == "sglang" else "/v1/load_lora_adapter"
        await self._request("POST", path, {"lora_name": name, "lora_path": folder}, timeout_s)

    async def unload_adapter(self, kind: EngineKind, name: str, *, timeout_s: float) -> None:
        """Forget an adapter."""
        path = "/unload_lora_adapter" if kind == "sglang" else "/v1/unload_lora_adapter"
        await self._request("POST", path, {"lora_name": name}, timeout_s)

    async def post(self, path: str, body: Mapping[str, object], *, timeout_s: float) -> object:
        """The JSON that answers a request."""
        return await self._send("POST", path, body, timeout_s)

    async def _request(
        self, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float
    ) -> dict[str, object]:
        answer = await self._send(method, path, body, timeout_s)
        return cast("dict[str, object]", answer) if isinstance(answer, dict) else {}

    async def _optional(self, path: str, timeout_s: float) -> dict[str, object] | None:
        """The answer to a GET; None where there is no such path."""
        try:
            return await self._request("GET", path, None, timeout_s)
        except EngineError as error:
            if error.is_gone:
                raise
            return None

    async def _send(self, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float) -> object:
        try:
            reply = await self._client.request(method, self._base + path, json=body, timeout=timeout_s)
        except httpx.TimeoutException as error:
            raise EngineError(f"{self._base}{path}: no answer within {timeout_s:g} s", is_gone=True) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineError(f"{self._base}{path}: {type(error).__name__}: {error}", is_gone=True) from error
        try:
            content: object = reply.json()
        except ValueError:
            content = reply.text  # vLLM answers some requests by a sentence
        refused = isinstance(content, dict) and content.get("success") is False
        if reply.status_code != 200 or refused:
            said = content.get("message") or content.get("error") if isinstance(content, dict) else content
            raise EngineError(f"{self._base}{path}: HTTP {reply.status_code}: {str(said)[:500]}")
        return content


def _kept(said: Mapping[str, object]) -> Info:
    return {
        name: value
        for name in _KEPT
        if isinstance(value := said.get(name), (str, int, float, bool)) or (value is None and name in said)
    }
