"""SGLang's HTTP API for updating weights. All requests block and take a timeout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import httpx

from xorl.ckpt.layout import TensorRecord

PauseMode = Literal["abort", "retract", "in_place"]


class ReceiverError(Exception):
    """A request to a receiver failed; the message has the path and the reason."""


class SglangServer:
    """Client of one SGLang server at `http://host:port`. Every call raises ReceiverError on failure. Thread-safe."""

    def __init__(self, host: str, port: int, *, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._base = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        # Inference servers are in the same private network, so ignore proxy settings of the environment.
        self._client = httpx.Client(trust_env=False)

    def pause(self, mode: PauseMode, *, timeout_s: float) -> None:
        """Pause generation. in_place keeps requests and cache, retract only their tokens, abort ends the requests."""
        self._post("/pause_generation", {"mode": mode}, timeout_s)

    def resume(self, *, timeout_s: float) -> None:
        self._post("/continue_generation", {}, timeout_s)

    def join_group(
        self, name: str, *, address: str, port: int, world_size: int, backend: str, timeout_s: float
    ) -> None:
        """Join a group in which the trainer is rank 0, and wait for it. world_size includes the trainer."""
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        self._post("/init_weights_update_group", body, timeout_s)

    def leave_group(self, name: str, *, timeout_s: float) -> None:
        self._post("/destroy_weights_update_group", {"group_name": name}, timeout_s)

    def receive(self, name: str, records: Mapping[str, TensorRecord], *, version: str | None, timeout_s: float) -> None:
        """Receive one broadcast with the concatenated tensors of `records`, and load them.

        The cache is flushed by a separate call: a flush that fails within this one would end SGLang's scheduler.
        """
        body: dict[str, object] = {
            "names": list(records),
            "dtypes": [record.dtype for record in records.values()],
            "shapes": [list(record.shape) for record in records.values()],
            "group_name": name,
            "flush_cache": False,
            "load_format": "flattened_bucket",
        }
        if version is not None:
            body["weight_version"] = version
        self._post("/update_weights_from_distributed", body, timeout_s)

    def flush_cache(self, *, timeout_s: float) -> None:
        """Drop all cached keys and values. SGLang refuses while requests are queued."""
        self._post("/flush_cache", {}, timeout_s)

    def close(self) -> None:
        self._client.close()

    def _post(self, path: str, body: Mapping[str, object], timeout_s: float) -> None:
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, self._connect_timeout_s))
        try:
            reply = self._client.post(self._base + path, json=body, timeout=timeout)
        except httpx.TimeoutException as error:
            raise ReceiverError(f"{path}: no answer within {timeout_s:g} s ({type(error).__name__})") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ReceiverError(f"{path}: {type(error).__name__}: {error}") from error
        refusal = _refusal(reply)
        if refusal is not None:
            raise ReceiverError(f"{path}: {refusal}")


def _refusal(reply: httpx.Response) -> str | None:
    """The error message of an unsuccessful reply; None for success."""
    try:
        content: object = reply.json()
    except ValueError:
        content = None
    fields = content if isinstance(content, dict) else {}
    if reply.status_code == 200 and fields.get("success") is not False:
        return None
    message = fields.get("message") or reply.text[:500]
    return f"HTTP {reply.status_code}: {message}"
