"""What has to be known of the model and of this machine before anything is started, found out in another process.

That loads torch, which the launcher and the orchestrator do not: `surveyor` is what runs there.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from xorl.config import ServerConfig


class Survey(msgspec.Struct, frozen=True):
    """What was found.

    num_gpus: that torch finds here. arch: the model's family, in Hugging Face's word. max_context_length: in tokens.
    """

    num_gpus: int
    arch: str
    vocab_size: int
    max_context_length: int


def survey(config_file: Path) -> Survey:
    """Look. Raises ValueError, with its message, for a model that is not there or not known."""
    command = [sys.executable, "-m", "xorl.server.surveyor", str(config_file)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise ValueError(ended.stderr.strip())
    return msgspec.json.decode(ended.stdout, type=Survey)


def tokenizer_of(config: ServerConfig) -> str:
    """The tokenizer as clients are told it: a Hub id as it is, a folder in full."""
    path = config.tokenizer_path or config.config_path or config.model_path
    assert path is not None, "checked by the configuration"
    return str(Path(path).resolve()) if Path(path).exists() else path
