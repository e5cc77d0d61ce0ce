"""The environment variables that xorl reads.

These are the variables named in a configuration, XORL_DATASET_NUM_PROC, and the API keys of services, under the names
that their clients use. WANDB_MODE, which wandb reads, is only checked.
"""

import os
import re
from collections.abc import Callable

DATASET_NUM_PROC = "XORL_DATASET_NUM_PROC"
WANDB_MODE = "WANDB_MODE"
WANDB_MODES = ("online", "offline", "shared", "disabled", "dryrun", "run")
SERVICE_KEYS = ("XORL_API_KEY", "TINKER_API_KEY")
REFERENCE = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^{}]*))?\}|(?P<broken>\$\{)")


def substitute(text: str, used: list[str], report: Callable[[str], None]) -> str:
    """Expands `${VAR}` and `${VAR:-default}` in a scalar; `$${` stands for `${`.

    Appends the names of variables to `used` and passes errors to `report`. As in a shell, the default applies if the
    variable is unset or empty.
    """

    def replacement(match: re.Match[str]) -> str:
        if match["broken"]:
            report("contains an incomplete ${; write ${NAME} or ${NAME:-default}, or $${ for a literal ${")
            return ""
        name, default = match["name"], match["default"]
        if not name:
            return "${"
        value = os.environ.get(name)
        if value is None and default is None:
            report(f"the environment variable {name} is not set; set it or write ${{{name}:-default}}")
            return ""
        used.append(name)
        return value or default or ""

    return REFERENCE.sub(replacement, text)


def dataset_num_proc() -> tuple[int, str]:
    """Returns the number of processes that prepare data, and the origin of that number.

    Raises ValueError if XORL_DATASET_NUM_PROC is not a positive integer.
    """
    text = os.environ.get(DATASET_NUM_PROC)
    if text:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"the environment variable {DATASET_NUM_PROC} must be an integer >= 1, got {text!r}")
        return int(text), f"environment {DATASET_NUM_PROC}"
    # A container or scheduler may restrict this process to some of the machine's cores.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores, "default, the number of CPU cores"


def check_wandb_mode() -> None:
    """Raises ValueError if wandb does not know the value of WANDB_MODE."""
    mode = os.environ.get(WANDB_MODE)
    if mode and mode not in WANDB_MODES:
        raise ValueError(
            f"the environment variable {WANDB_MODE} must be one of {', '.join(WANDB_MODES[:4])}, got {mode!r}: change "
            "it, or set train.use_wandb to false"
        )


def service_key() -> str | None:
    """Returns the API key that a client would send, or None."""
    return next((value for name in SERVICE_KEYS if (value := os.environ.get(name))), None)
