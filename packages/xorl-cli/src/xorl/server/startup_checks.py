"""What has to be known of the model and of this machine before anything is started. Nothing here loads torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from xorl.config import ServerConfig
from xorl.server.orchestrator.served import describe

DRIVER = Path("/proc/driver/nvidia/version")
COUNT = "import torch; print(torch.cuda.device_count())"


def check_model(config: ServerConfig) -> None:
    """Raise ValueError that names the option where the model's config.json is not to be had, or is none.

    Whether it is of a model that is known, the workers say.
    """
    option = "model_path" if config.config_path in (None, config.model_path) else "config_path"
    path = str(config.config_path or config.model_path)
    try:
        described = describe(path)
    except json.JSONDecodeError as error:
        raise ValueError(f"{option}: the config.json of {path} is not JSON: {error}") from error
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        why = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{option}: {path} is no folder with a config.json, and no model of the Hub that can be had: {why}"
        ) from error
    if not isinstance(described, dict) or "model_type" not in described:
        raise ValueError(f"{option}: the config.json of {path} names no model_type, so it is of no model")


def count_gpus() -> int:
    """How many GPUs torch finds; it is asked in another process, so that this one stays small."""
    if not DRIVER.exists():
        return 0
    asked = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        raise RuntimeError(f"torch cannot be loaded to count the GPUs: {asked.stderr.strip()}")
    return int(asked.stdout)
