"""Weights & Biases as a sink, offline where there is no key or no network."""

from __future__ import annotations

import logging
import netrc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import wandb
from wandb.errors import CommError, UsageError

from xorl.train.observe import Metrics

logger = logging.getLogger(__name__)


class WandbSink:
    """A wandb run. Steps are logged every `log_interval`, evaluations always."""

    def __init__(
        self,
        *,
        project: str,
        name: str | None,
        tags: Sequence[str] | None,
        log_interval: int,
        folder: Path,
        config: Mapping[str, object],
    ) -> None:
        offline = credentials_are_missing()
        if offline:
            logger.info("wandb=offline reason=no_api_key folder=%s later='wandb sync'", folder / "wandb")
        self._log_interval = log_interval
        settings = wandb.Settings(silent=True, init_timeout=30)
        options = {
            "project": project,
            "name": name,
            "tags": list(tags or ()),
            "dir": str(folder),
            "config": dict(config),
        }
        try:
            self._run = wandb.init(mode="offline" if offline else None, settings=settings, **options)
        except (CommError, UsageError) as error:
            logger.info("wandb=offline reason=%r folder=%s", str(error).splitlines()[0], folder / "wandb")
            self._run = wandb.init(mode="offline", settings=settings, **options)

    def write(self, metrics: Metrics) -> None:
        """Log one record."""
        step = metrics["step"]
        assert isinstance(step, int)
        if step % self._log_interval == 0 or "eval_loss" in metrics:
            self._run.log({key: value for key, value in metrics.items() if value is not None}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def credentials_are_missing() -> bool:
    """Whether wandb is to go online and would have to ask for a key."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE", "online") not in ("online", "shared"):
        return False
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return host not in netrc.netrc().hosts
    except (FileNotFoundError, netrc.NetrcParseError):
        return True
