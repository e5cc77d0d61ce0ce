"""The file run.json: the resolved options of a run, and where and with what it runs. `xorl report` reads it."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

from xorl.config import Config
from xorl.train.bench.environment import environment

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
    path = folder / RUN
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ValueError(
            f"train.output_dir: {path} cannot be written ({error.strerror}); make room, or choose another folder"
        ) from error
