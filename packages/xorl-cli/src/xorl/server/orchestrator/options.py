"""What an orchestrator is started with: plain values, so that it reads no configuration and loads no torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

from xorl.server.queries import AddEndpoint


class OrchestratorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The service as its configuration has it, and where the other processes are. Times are in seconds.

    api_address: where it listens for the API. worker_address: where rank 0 listens; keys: a file of ChannelKeys where
    that is beyond this machine. workers_file: where a later rank 0 publishes its address, if it may have another.
    model_name: what clients ask for and see; model_path is taken as its name too. tokenizer: a name or folder.
    lora_rank, lora_alpha: of adapters for which the client says nothing; None where full weights are trained.
    gap_timeout_s: for how long a number may be missing before what waits for it fails; clients retry for 300 s.
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
        """The journal; its folder holds the lock that keeps a second orchestrator away."""
        return self.folder / "service" / "journal.sqlite"
