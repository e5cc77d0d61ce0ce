"""HTTP requests to an inference server: health, description, adapters, samples; not the transfer of weights.

There are two kinds of servers, SGLang and vLLM, recognized by the paths that they serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, cast

import httpx

EngineKind = Literal["sglang", "vllm"]
Info: TypeAlias = dict[str, str | int | float | bool | None]

# The fields of a server's description that are checked for compatibility or shown to clients.
_SHOWN_FIELDS = (
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
    """A server failed or refused a request. is_gone: it did not answer at all."""

    def __init__(self, message: str, *, is_gone: bool = False) -> None:
        super().__init__(message)
        self.is_gone = is_gone


class InferenceEngine:
    """A server at `http://host:port`. Every method raises EngineError if the request fails.

    The client is shared; the caller closes it.
    """

    def __init__(self, client: httpx.AsyncClient, host: str, port: int) -> None:
        self._client = client
        self._base = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def check_health(self, *, timeout_s: float) -> None:
        """Raise EngineError unless the server answers and is ready."""
        await self._get("/health", timeout_s)

    async def describe(self, *, timeout_s: float) -> Info:
        """The server's description: its `kind` (an EngineKind) and some of the fields that it reports."""
        for path in ("/server_info", "/get_server_info"):
            info = await self._optional(path, timeout_s)
            if info is not None:
                return {"kind": "sglang", **_shown(info)}
        info = await self._optional("/version", timeout_s)
        if info is None:
            raise EngineError(
                f"{self._base} serves neither /server_info (SGLang) nor /version (vLLM); other engines are not "
                "supported"
            )
        models = await self._get("/v1/models", timeout_s)
        listed = models.get("data")
        first = listed[0] if isinstance(listed, list) and listed else {}
        path, length = first.get("root") or first.get("id"), first.get("max_model_len")
        model = {"model_path": path, "served_model_name": first.get("id"), "context_length": length}
        return {"kind": "vllm", **_shown({**model, "version": info.get("version")})}

    async def load_adapter(self, kind: EngineKind, name: str, folder: str, *, timeout_s: float) -> None:
        """Load an adapter in PEFT's format under an unused name. The server must be able to read the folder."""
        path = "/load_lora_adapter" if kind == "sglang" else "/v1/load_lora_adapter"
        await self.request("POST", path, {"lora_name": name, "lora_path": folder}, timeout_s=timeout_s)

    async def unload_adapter(self, kind: EngineKind, name: str, *, timeout_s: float) -> None:
        """Unload an adapter."""
        path = "/unload_lora_adapter" if kind == "sglang" else "/v1/unload_lora_adapter"
        await self.request("POST", path, {"lora_name": name}, timeout_s=timeout_s)

    async def request(
        self, method: str, path: str, body: Mapping[str, object] | None = None, *, timeout_s: float
    ) -> object:
        """The answer to a request: JSON, or text if it is not JSON."""
        try:
            response = await self._client.request(method, self._base + path, json=body, timeout=timeout_s)
        except httpx.TimeoutException as error:
            raise EngineError(f"{self._base}{path}: no answer within {timeout_s:g} s", is_gone=True) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineError(f"{self._base}{path}: {type(error).__name__}: {error}", is_gone=True) from error
        try:
            content: object = response.json()
        except ValueError:
            content = response.text  # vLLM answers some requests in plain text
        refused = isinstance(content, dict) and content.get("success") is False
        if response.status_code != 200 or refused:
            reason = content.get("message") or content.get("error") if isinstance(content, dict) else content
            raise EngineError(f"{self._base}{path}: HTTP {response.status_code}: {str(reason)[:500]}")
        return content

    async def _get(self, path: str, timeout_s: float) -> dict[str, object]:
        answer = await self.request("GET", path, timeout_s=timeout_s)
        return cast("dict[str, object]", answer) if isinstance(answer, dict) else {}

    async def _optional(self, path: str, timeout_s: float) -> dict[str, object] | None:
        """The answer to a GET request; None if the server refuses it, for example because it lacks the path."""
        try:
            return await self._get(path, timeout_s)
        except EngineError as error:
            if error.is_gone:
                raise
            return None


def _shown(info: Mapping[str, object]) -> Info:
    return {
        name: value
        for name in _SHOWN_FIELDS
        if isinstance(value := info.get(name), (str, int, float, bool)) or (value is None and name in info)
    }
