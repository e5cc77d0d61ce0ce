"""`python -m xorl.server.surveyor FILE`: looks at the model of a service, and prints how many GPUs are here."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from xorl.config import load_server_config
from xorl.config.server_training import in_server_terms, training_config
from xorl.train.model import read_architecture


def main() -> int:
    """Prints the number, or what is wrong with the model, and returns the exit code."""
    try:
        read_architecture(training_config(load_server_config(Path(sys.argv[1])).config).model)
    except (ValueError, RuntimeError) as error:
        sys.stderr.write(f"{in_server_terms(str(error))}\n")
        return 2
    sys.stdout.write(f"{torch.cuda.device_count()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
