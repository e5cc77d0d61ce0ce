"""Bodies with a few fields, named as by the clients."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from xorl.server.identifiers import SeqId


class ModelBody(msgspec.Struct, frozen=True):
    """A model and the number of the call."""

    model_id: str = "default"
    seq_id: SeqId | None = None


class KillBody(msgspec.Struct, frozen=True):
    """The body of /kill_session."""

    model_id: str = "default"
    save_checkpoint: bool = True


class SessionBody(msgspec.Struct, frozen=True):
    """The body of /create_session and /session_heartbeat."""

    session_id: str | None = None
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    sdk_version: str | None = None


class FinishReason(msgspec.Struct, frozen=True):
    """The reason why a session is finished."""

    type: str = "success"


class FinishBody(msgspec.Struct, frozen=True):
    """The body of /sessions/{id}/finish."""

    reason: FinishReason = FinishReason()
    detail: str | None = None


class SamplingSessionBody(msgspec.Struct, frozen=True):
    """The body of /create_sampling_session."""

    session_id: str | None = None
    sampling_session_seq_id: SeqId | None = None
    base_model: str | None = None
    model_path: str | None = None
    model_id: str | None = None


class FutureBody(msgspec.Struct, frozen=True):
    """The body of /retrieve_future and /cancel_future."""

    request_id: str
    allow_metadata_only: bool = False


class WeightsInfoBody(msgspec.Struct, frozen=True):
    """The body of /weights_info; each client has its own name for the URI."""

    tinker_path: str | None = None
    xorl_path: str | None = None


class DeleteBody(msgspec.Struct, frozen=True):
    """The body of /delete_checkpoint."""

    checkpoint_id: str
    model_id: str = "default"


class TtlBody(msgspec.Struct, frozen=True):
    """The body of .../ttl; None: never expires."""

    ttl_seconds: float | None = None


class EndpointBody(msgspec.Struct, frozen=True):
    """The body of /add_inference_endpoint and /remove_inference_endpoint."""

    host: str
    port: int
    worker_port: int | None = None
    world_size: int = 1
    pool: str = "default"
    receiver_kv_cache_dtype: str | None = None
    model_id: str | None = None
    sync_weights: bool = False
    master_address: str | None = None
    master_port: int = 0
    group_name: str = "weight_sync_group"
    buffer_size_mb: int = 1024


class ConnectBody(msgspec.Struct, frozen=True):
    """The body of /connect_inference_endpoint."""

    master_address: str | None = None
    master_port: int = 0
    group_name: str = "weight_sync_group"


class SyncBody(msgspec.Struct, frozen=True):
    """The body of /sync_inference_weights. xorl-client does not send a model_id."""

    model_id: str | None = None
    sync_method: str | None = None
    master_address: str | None = None
    master_port: int = 0
    group_name: str = "weight_sync_group"
    buffer_size_mb: int = 1024
    flush_cache: bool | None = None
    cache_invalidation_mode: Literal["auto", "flush", "none"] = "auto"
    pause_mode: Literal["retract", "abort", "in_place"] = "retract"
    weight_version: str | None = None
    quantization: dict[str, Any] | None = None
    pools: list[str] | None = None


class QuantizationBody(msgspec.Struct, frozen=True):
    """The body of /set_sync_quantization: a `quantization_config` as in Hugging Face's files, or null."""

    quantization: dict[str, Any] | None
