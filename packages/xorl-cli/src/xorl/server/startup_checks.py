"""Checks of the model and of this machine before the service starts, without loading torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from xorl.config import ServerConfig
from xorl.server.orchestrator.from_config import read_model_config

DRIVER = Path("/proc/driver/nvidia/version")
COUNT = "import torch; print(torch.cuda.device_count())"


def check_model(config: ServerConfig) -> None:
    """Raise ValueError, naming the option, if the model's config.json cannot be found or read.

    The workers check whether its model type is supported.
    """
    option = "model_path" if config.config_path in (None, config.model_path) else "config_path"
    path = str(config.config_path or config.model_path)
    try:
        model_config = read_model_config(path)
    except json.JSONDecodeError as error:
        raise ValueError(f"{option}: the config.json of {path} is not JSON: {error}") from error
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{option}: {path} is neither a folder with a config.json nor a model that can be loaded from the Hub: "
            f"{reason}"
        ) from error
    if not isinstance(model_config, dict) or "model_type" not in model_config:
        raise ValueError(f"{option}: the config.json of {path} has no model_type; choose the folder of a model")


def count_gpus() -> int:
    """The number of GPUs that torch finds, counted in another process so that this one does not load torch."""
    if not DRIVER.exists():
        return 0
    counted = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=False)
    if counted.returncode != 0:
        raise RuntimeError(f"torch cannot be loaded to count the GPUs: {counted.stderr.strip()}")
    return int(counted.stdout)
