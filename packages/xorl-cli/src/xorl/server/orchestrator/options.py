"""The orchestrator's options as plain values, independent of the service's configuration."""

from __future__ import annotations

from pathlib import Path

import msgspec

from xorl.server.queries import AddEndpoint


class OrchestratorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The service's settings and the addresses of the other processes. Times are in seconds.

    api_address: on which it listens for the API. worker_address: on which rank 0 listens; keys: a file of ChannelKeys,
    needed if rank 0 is reached over the network. workers_file: in which a restarted rank 0 publishes its address, if
    that can change. model_name: the name that clients use; they may also use model_path. tokenizer: a name or folder.
    lora_rank, lora_alpha: defaults for adapters; None if full weights are trained. gap_timeout_s: how long requests
    wait for a missing number before they fail; clients retry for 300 s.
    """

    api_address: str
    worker_address: str
    output_dir: str
    model_name: str
    model_path: str
    tokenizer: str
    arch: str
    vocab_size: int
    enable_lora: bool = False
    lora_rank: int | None = None
    lora_alpha: float | None = None
    workers_file: str | None = None
    keys: str | None = None
    endpoints: tuple[AddEndpoint, ...] = ()
    storage_limit_bytes: int = 10 * 10**12
    idle_session_timeout_s: float = 7200.0
    skip_initial_checkpoint: bool = False
    seed: int = 0
    worker_connection_timeout_s: float = 120.0
    worker_max_retries: int = 3
    max_queued: int = 20_000
    max_sessions: int = 1024
    result_retention_s: float = 3600.0
    gap_timeout_s: float = 360.0

    @property
    def folder(self) -> Path:
        """The output folder."""
        return Path(self.output_dir)

    @property
    def journal_path(self) -> Path:
        """The journal's file. The lock beside it keeps out a second orchestrator."""
        return self.folder / "service" / "journal.sqlite"
