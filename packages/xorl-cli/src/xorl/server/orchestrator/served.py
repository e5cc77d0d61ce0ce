"""From the service's configuration to what the orchestrator is started with; a model's config.json is read here."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import hf_hub_download

from xorl.config import ServerConfig
from xorl.config.server import InferenceEndpointConfig
from xorl.server.operations import Endpoint
from xorl.server.orchestrator.options import OrchestratorOptions
from xorl.server.queries import AddEndpoint


def options_of(
    config: ServerConfig, *, api_address: str, worker_address: str, workers_file: Path | None, keys: Path | None
) -> OrchestratorOptions:
    """The orchestrator's share of a configuration whose defaults are filled in."""
    path = config.config_path or config.model_path
    assert path is not None, "the configuration names a model"
    described = describe(path)
    enable_lora = config.enable_lora or config.enable_qlora
    return OrchestratorOptions(
        api_address=api_address,
        worker_address=worker_address,
        output_dir=config.output_dir,
        model_name=config.model_name or path,
        model_path=config.model_path or path,
        tokenizer=_for_clients(config.tokenizer_path or path),
        arch=str(described.get("model_type", "")),
        vocab_size=_integer(described, "vocab_size"),
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


def _endpoint(listed: InferenceEndpointConfig) -> AddEndpoint:
    return AddEndpoint(
        Endpoint(listed.host, listed.port, listed.world_size, listed.sync_weights),
        listed.group_name,
        listed.master_address or "",
        listed.master_port,
        listed.buffer_size_mb,
    )


def _for_clients(path: str) -> str:
    """A Hub id as it is, a folder in full: clients on this machine may have been started elsewhere."""
    return str(Path(path).resolve()) if Path(path).exists() else path


def describe(path: str) -> dict[str, object]:
    """A model's config.json, of a folder, a file or a Hub id."""
    given = Path(path)
    file = given if given.is_file() else given / "config.json"
    if not file.is_file():
        # The workers load the same; whoever is first fetches it.
        file = Path(hf_hub_download(path, "config.json"))
    described = json.loads(file.read_text(encoding="utf-8"))
    return described.get("text_config") or described


def _integer(described: dict[str, object], name: str) -> int:
    value = described.get(name, 0)
    return value if isinstance(value, int) else 0
