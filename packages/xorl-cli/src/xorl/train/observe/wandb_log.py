"""Weights & Biases as a metrics sink; offline without an API key or network."""

from __future__ import annotations

import hashlib
import json
import logging
import netrc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import wandb
from wandb.errors import CommError, UsageError

from xorl.train.observe.observer import Metrics

logger = logging.getLogger(__name__)

# The file in output_dir with the id of the wandb run, and a hash of the options it was logged with.
RUN_ID = "wandb_run_id"
# The key in a wandb run's config for the run and step from which it continues.
CONTINUED = "continued_from"


class WandbSink:
    """Logs to a wandb run: every `log_interval`-th step, and all evaluations.

    A resumed run continues the wandb run whose id is in `folder`; otherwise a new wandb run is created and its id is
    saved there. WANDB_RUN_ID and WANDB_RESUME take precedence. wandb keeps the first values of steps that are logged
    again. A run that `went_back` to an earlier checkpoint therefore gets a new wandb run, whose config names the old
    run and the step; so does one that `repeats` steps with other options, whose values differ.
    """

    def __init__(
        self,
        *,
        project: str,
        name: str | None,
        tags: Sequence[str] | None,
        log_interval: int,
        folder: Path,
        config: Mapping[str, object],
        start_step: int,
        went_back: bool,
        repeats: bool,
    ) -> None:
        offline = credentials_are_missing()
        if offline:
            logger.info("wandb=offline reason=no_api_key folder=%s later='wandb sync'", folder / "wandb")
        self._log_interval = log_interval
        file = folder / RUN_ID if start_step else None
        continued = None
        options_hash = _hash(config)
        if file is not None and file.exists():
            old, *hashes = file.read_text(encoding="utf-8").split()
            if went_back or (repeats and hashes not in ([], [options_hash])):
                continued = {"run": old, "step": start_step}
                file = None
        settings = wandb.Settings(silent=True, init_timeout=30)
        options = {
            "project": project,
            "name": name,
            "tags": list(tags or ()),
            "dir": str(folder),
            "config": {**config, **({} if continued is None else {CONTINUED: continued})},
            **_run_options(file),
        }
        try:
            self._run = wandb.init(mode="offline" if offline else None, settings=settings, **options)
        except (CommError, UsageError) as error:
            logger.info("wandb=offline reason=%r folder=%s", str(error).splitlines()[0], folder / "wandb")
            self._run = wandb.init(mode="offline", settings=settings, **options)
        (folder / RUN_ID).write_text(f"{self._run.id}\n{options_hash}\n", encoding="utf-8")
        if continued is not None:
            old, step = continued.values()
            logger.info("wandb: new run %s, because the values after step %s of %s change", self._run.id, step, old)

    def write(self, metrics: Metrics) -> None:
        step = metrics["step"]
        assert isinstance(step, int)
        if step % self._log_interval == 0 or "eval_loss" in metrics:
            self._run.log({key: value for key, value in metrics.items() if value is not None}, step=step)

    def close(self) -> None:
        self._run.finish()


def _run_options(file: Path | None) -> dict[str, str]:
    """`id` and `resume` for `wandb.init`; omitted options come from its environment variables or are generated."""
    options: dict[str, str] = {}
    if file is not None and file.exists() and not os.environ.get("WANDB_RUN_ID"):
        options["id"] = _read_id(file)
    if not os.environ.get("WANDB_RESUME"):
        options["resume"] = "allow"
    return options


def _read_id(file: Path) -> str:
    return file.read_text(encoding="utf-8").split()[0]


def _hash(config: Mapping[str, object]) -> str:
    """Identifies the options of a run, whichever checkpoint it resumes from."""
    train = config.get("train")
    options = {**config, "train": {**train, "load_checkpoint_path": None}} if isinstance(train, dict) else {**config}
    return hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode()).hexdigest()


def credentials_are_missing() -> bool:
    """Whether wandb is configured to run online but has no API key, and would prompt for one."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE", "online") not in ("online", "shared"):
        return False
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return host not in netrc.netrc().hosts
    except (FileNotFoundError, netrc.NetrcParseError):
        return True
