"""Builds OrchestratorOptions from the service's configuration, and reads a model's config.json."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import hf_hub_download

from xorl.config import ServerConfig
from xorl.config.server import InferenceEndpointConfig
from xorl.server.operations import Endpoint
from xorl.server.orchestrator.options import OrchestratorOptions
from xorl.server.queries import AddEndpoint


def options_from_config(
    config: ServerConfig, *, api_address: str, worker_address: str, workers_file: Path | None, keys: Path | None
) -> OrchestratorOptions:
    """The orchestrator's options from a resolved configuration."""
    path = config.config_path or config.model_path
    assert path is not None, "a resolved configuration has a model"
    model_config = read_model_config(path)
    vocab_size = model_config.get("vocab_size", 0)
    enable_lora = config.enable_lora or config.enable_qlora
    return OrchestratorOptions(
        api_address=api_address,
        worker_address=worker_address,
        output_dir=config.output_dir,
        model_name=config.model_name or path,
        model_path=config.model_path or path,
        tokenizer=_absolute(config.tokenizer_path or path),
        arch=str(model_config.get("model_type", "")),
        vocab_size=vocab_size if isinstance(vocab_size, int) else 0,
        enable_lora=enable_lora,
        lora_rank=config.lora_rank if enable_lora else None,
        lora_alpha=config.lora_alpha if enable_lora else None,
        workers_file=None if workers_file is None else str(workers_file),
        keys=None if keys is None else str(keys),
        endpoints=tuple(map(_endpoint, config.inference_endpoints)),
        storage_limit_bytes=config.storage_limit_bytes,
        idle_session_timeout_s=config.idle_session_timeout,
        skip_initial_checkpoint=config.skip_initial_checkpoint,
        seed=config.seed,
        worker_connection_timeout_s=config.worker_connection_timeout,
        worker_max_retries=config.worker_max_retries,
        max_queued=config.max_queued_requests,
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
