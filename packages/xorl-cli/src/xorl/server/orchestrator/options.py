"""The orchestrator's options as plain values, and how they follow from the service's configuration."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from huggingface_hub import hf_hub_download

from xorl.config import ServerConfig
from xorl.config.server import InferenceEndpointConfig
from xorl.server.endpoint_queries import AddEndpoint
from xorl.server.operations import Endpoint


class OrchestratorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The service's settings and the addresses of the other processes. Times are in seconds.

    api_address: the address where the orchestrator listens for the API. worker_address: the address where rank 0
    listens; keys: a file of ChannelKeys, needed if rank 0 is reached over the network. workers_file: the file in which
    a restarted rank 0 publishes its address, if that can change. restarts_file: the launcher's file about restarts
    (`restarts`). model_name: the name that clients use; they may also use model_path and tokenizer_path. tokenizer: a
    name or folder. tokenizer_path: as configured, if it is not the model's own. lora_rank, lora_alpha: defaults for
    adapters; None if full weights are trained. tokens_per_row: the tokens of a micro-batch on each rank.
    max_client_share: a client's share of max_queued and max_queued_bytes. gap_timeout_s: how long requests wait for a
    missing number before they fail; clients retry for 300 s.
    """

    api_address: str
    worker_address: str
    output_dir: str
    model_name: str
    model_path: str
    tokenizer: str
    arch: str
    vocab_size: int
    tokenizer_path: str | None = None
    enable_lora: bool = False
    lora_rank: int | None = None
    lora_alpha: float | None = None
    workers_file: str | None = None
    restarts_file: str | None = None
    keys: str | None = None
    endpoints: tuple[AddEndpoint, ...] = ()
    allowed_inference_hosts: tuple[str, ...] | None = None
    storage_limit_bytes: int = 10 * 10**12
    idle_session_timeout_s: float = 7200.0
    finished_session_retention_s: float = 24 * 3600.0
    skip_initial_checkpoint: bool = False
    seed: int = 0
    worker_connection_timeout_s: float = 120.0
    worker_max_retries: int = 3
    tokens_per_row: int = 32_000
    max_queued: int = 20_000
    max_queued_bytes: int = 8 * 10**9
    max_client_share: float = 0.5
    max_sessions: int = 1024
    result_retention_s: float = 3600.0
    gap_timeout_s: float = 360.0

    @property
    def base_names(self) -> tuple[str, ...]:
        """The names of the base."""
        return tuple(filter(None, (self.model_name, self.model_path, self.tokenizer_path, self.tokenizer_name)))

    @property
    def tokenizer_name(self) -> str:
        """The base's name, by which clients load the tokenizer: model_name, unless the tokenizer is elsewhere."""
        return self.model_name if self.tokenizer_path is None else self.tokenizer

    @property
    def folder(self) -> Path:
        """The output folder."""
        return Path(self.output_dir)

    @property
    def journal_path(self) -> Path:
        """The journal's file. The lock beside it keeps out a second orchestrator."""
        return self.folder / "service" / "journal.sqlite"


def options_from_config(
    config: ServerConfig,
    *,
    api_address: str,
    worker_address: str,
    workers_file: Path | None,
    restarts_file: Path | None,
    keys: Path | None,
) -> OrchestratorOptions:
    """The orchestrator's options from a resolved configuration."""
    path = config.config_path or config.model_path
    assert path is not None, "a resolved configuration has a model"
    model_config = read_model_config(path)
    vocab_size = model_config.get("vocab_size", 0)
    return OrchestratorOptions(
        api_address=api_address,
        worker_address=worker_address,
        output_dir=config.output_dir,
        model_name=config.model_name or path,
        model_path=config.model_path or path,
        tokenizer=_absolute(config.tokenizer_path or path),
        # By default, the tokenizer is at the model's own path, for which model_name stands.
        tokenizer_path=None if config.tokenizer_path == path else config.tokenizer_path,
        arch=str(model_config.get("model_type", "")),
        vocab_size=vocab_size if isinstance(vocab_size, int) else 0,
        enable_lora=config.has_adapters,
        lora_rank=config.lora_rank if config.has_adapters else None,
        lora_alpha=config.lora_alpha if config.has_adapters else None,
        workers_file=None if workers_file is None else str(workers_file),
        restarts_file=None if restarts_file is None else str(restarts_file),
        keys=None if keys is None else str(keys),
        endpoints=tuple(map(_endpoint, config.inference_endpoints)),
        allowed_inference_hosts=None
        if config.allowed_inference_hosts is None
        else tuple(config.allowed_inference_hosts),
        storage_limit_bytes=config.storage_limit_bytes,
        idle_session_timeout_s=config.idle_session_timeout,
        finished_session_retention_s=config.finished_session_retention,
        skip_initial_checkpoint=config.skip_initial_checkpoint,
        seed=config.seed,
        worker_connection_timeout_s=config.worker_connection_timeout,
        worker_max_retries=config.worker_max_retries,
        tokens_per_row=config.sample_packing_sequence_len,
        max_queued=config.max_queued_requests,
        max_queued_bytes=int(config.max_queued_mb * 10**6),
        max_client_share=config.max_client_share,
        max_sessions=config.max_sessions,
        result_retention_s=config.result_retention,
    )


def read_model_config(path: str) -> dict[str, object]:
    """Read a model's config.json. path: a folder, a file or a Hub id."""
    given = Path(path)
    file = given if given.is_file() else given / "config.json"
    if not file.is_file():
        # The workers use the same cache, so the file is downloaded once.
        file = Path(hf_hub_download(path, "config.json"))
    model_config = json.loads(file.read_text(encoding="utf-8"))
    return model_config.get("text_config") or model_config


def _endpoint(configured: InferenceEndpointConfig) -> AddEndpoint:
    return AddEndpoint(
        Endpoint(configured.host, configured.port, configured.world_size, configured.sync_weights),
        configured.group_name,
        configured.master_address or "",
        configured.master_port,
        configured.buffer_size_mb,
    )


def _absolute(path: str) -> str:
    """A folder as an absolute path, since clients have other working directories; a Hub id unchanged."""
    return str(Path(path).resolve()) if Path(path).exists() else path
