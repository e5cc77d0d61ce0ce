"""The environment variables that xorl reads: those a configuration names itself, XORL_DATASET_NUM_PROC, and the keys of
services, under the names that their clients give them.
"""

import os
import re
from collections.abc import Callable

DATASET_NUM_PROC = "XORL_DATASET_NUM_PROC"
SERVICE_KEYS = ("XORL_API_KEY", "TINKER_API_KEY")
REFERENCE = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^{}]*))?\}|(?P<broken>\$\{)")


def substitute(text: str, used: list[str], report: Callable[[str], None]) -> str:
    """Replaces `${VAR}` and `${VAR:-default}` in a scalar; `$${` stands for `${`.

    Appends the names of variables to `used` and tells `report` what is wrong. As in a shell, a default serves when the
    variable is unset or empty.
    """

    def replacement(match: re.Match[str]) -> str:
        if match["broken"]:
            report("holds an unfinished ${; write ${NAME} or ${NAME:-default}, or $${ for the text itself")
            return ""
        name, default = match["name"], match["default"]
        if not name:
            return "${"
        value = os.environ.get(name)
        if value is None and default is None:
            report(f"the environment variable {name} is not set; set it, or write ${{{name}:-default}}")
            return ""
        used.append(name)
        return value or default or ""

    return REFERENCE.sub(replacement, text)


def dataset_num_proc() -> tuple[int, str]:
    """Returns the number of processes that prepare data, and where the number is from.

    Raises ValueError when the variable is set to something that is not a positive integer.
    """
    text = os.environ.get(DATASET_NUM_PROC)
    if text:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"the environment variable {DATASET_NUM_PROC} wants an integer >= 1, got {text!r}")
        return int(text), f"environment {DATASET_NUM_PROC}"
    # A container or a scheduler may leave this process fewer cores than the machine has.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores, "default, the number of CPU cores"


def service_key() -> str | None:
    """Returns the key that clients of a service would send, if there is one."""
    return next((value for name in SERVICE_KEYS if (value := os.environ.get(name))), None)
