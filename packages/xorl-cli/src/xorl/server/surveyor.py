"""`python -m xorl.server.surveyor FILE`: prints the Survey of a service's configuration as JSON."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch

from xorl.config import ServerConfig, load_server_config
from xorl.config.server_training import in_server_terms, training_config
from xorl.server.survey import Survey
from xorl.train.model import read_architecture


def look(config: ServerConfig) -> Survey:
    """Read the model's configuration and count GPUs. Raises ValueError for a model that is not there or not known."""
    try:
        architecture = read_architecture(training_config(config).model)
    except ValueError as error:
        raise ValueError(in_server_terms(str(error))) from error
    return Survey(
        num_gpus=torch.cuda.device_count(),
        arch=str(architecture.hf_config.get("model_type", "")),
        vocab_size=architecture.config.vocab_size,
        max_context_length=architecture.config.max_position_embeddings,
    )


def main() -> int:
    """Prints what was found, or what is wrong, and returns the exit code."""
    try:
        found = look(load_server_config(Path(sys.argv[1])).config)
    except (ValueError, RuntimeError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
