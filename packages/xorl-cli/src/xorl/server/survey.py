"""What has to be known of the model and of this machine before anything is started, found out in another process.

That loads torch, which the launcher does not: `surveyor` is what runs there.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def survey(config_file: Path) -> int:
    """How many GPUs torch finds here. Raises ValueError, with its message, for a model that is not there or known."""
    command = [sys.executable, "-m", "xorl.server.surveyor", str(config_file)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise ValueError(ended.stderr.strip())
    return int(ended.stdout)
