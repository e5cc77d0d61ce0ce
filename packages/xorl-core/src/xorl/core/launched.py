"""The variable with which xorl's launchers tell ranks where the job's store is. Does not import torch."""

import fcntl
from pathlib import Path

# Set in addition to torchrun's variables. The value is a file's path for ranks of one host, and otherwise host:port.
STORE_VARIABLE = "XORL_STORE"


def store_in(folder: Path) -> dict[str, str]:
    """The variable for ranks of one host. Only users who may enter `folder` can read or write the store.

    Raises ValueError if files in the folder, which is under TMPDIR, cannot be locked: torch's FileStore locks its file.
    """
    try:
        with (folder / "locked").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ValueError(
            f"TMPDIR: files in {folder} cannot be locked ({error.strerror}), but the ranks of a host meet through a "
            "locked file: set TMPDIR to a folder on a local disk"
        ) from error
    return {STORE_VARIABLE: str(folder / "store")}


def store_at(address: str, port: int) -> dict[str, str]:
    """The variable for ranks of several hosts, whose store listens at this address."""
    return {STORE_VARIABLE: f"[{address}]:{port}" if ":" in address else f"{address}:{port}"}
