"""The file run.json: the resolved options of a run, and where and with what it runs. `xorl report` reads it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from xorl.config import Config
from xorl.train.bench.environment import environment
from xorl.train.output_dir import write_json

RUN = "run.json"


def write_run_file(folder: Path, config: Config, *, world_size: int, start_step: int, num_steps: int) -> None:
    """Write RUN into `folder`, replacing that of the process that this one continues.

    Raises ValueError if it cannot be written.
    """
    content = {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "start_step": start_step,
        "num_steps": num_steps,
        "world_size": world_size,
        "environment": {name: value for name, value in environment().items() if value is not None},
        "options": config.model_dump(mode="json"),
    }
    write_json(folder / RUN, content)
