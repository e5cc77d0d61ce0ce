"""What SGLang is asked over HTTP to take new weights. Requests block; each says how long it may take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import httpx

from xorl.ckpt import TensorRecord

PauseMode = Literal["abort", "retract", "in_place"]


class ReceiverError(Exception):
    """A receiver that did not do what it was asked; the message says what and why."""


class SglangServer:
    """One SGLang server at `http://host:port`. Every call raises ReceiverError where the server does not do it.

    Several threads may call it.
    """

    def __init__(self, host: str, port: int, *, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._base = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        # Engines stand in the same private network: what the environment says of proxies is for others.
        self._client = httpx.Client(trust_env=False)

    def pause(self, mode: PauseMode, *, timeout_s: float) -> None:
        """Stop generating: in_place keeps requests and their cache, retract their tokens alone, abort ends them."""
        self._post("/pause_generation", {"mode": mode}, timeout_s)

    def resume(self, *, timeout_s: float) -> None:
        """Go on generating."""
        self._post("/continue_generation", {}, timeout_s)

    def join_group(
        self, name: str, *, address: str, port: int, world_size: int, backend: str, timeout_s: float
    ) -> None:
        """Enter a group whose rank 0 is the trainer and the others the server, and wait for the trainer."""
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
        """Drop a group."""
        self._post("/destroy_weights_update_group", {"group_name": name}, timeout_s)

    def receive(self, name: str, records: Mapping[str, TensorRecord], *, version: str | None, timeout_s: float) -> None:
        """Take part in one broadcast of the bytes of `records`, one after another, and load what they say.

        The cache is flushed by a call of its own: within this one, a flush that is not possible ends the scheduler.
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
        """Forget all keys and values; SGLang refuses while requests wait."""
        self._post("/flush_cache", {}, timeout_s)

    def close(self) -> None:
        """Close the connections."""
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
    """Why the server did not do it; None where it did."""
    try:
        content: object = reply.json()
    except ValueError:
        content = None
    said = content if isinstance(content, dict) else {}
    if reply.status_code == 200 and said.get("success") is not False:
        return None
    message = said.get("message") or reply.text[:500]
    return f"HTTP {reply.status_code}: {message}"
