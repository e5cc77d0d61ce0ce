"""The file metrics.jsonl: written line by line, and read again by resumed runs and by what chooses checkpoints."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

Metrics = dict[str, float | int | None]


class MetricsFile:
    """`metrics.jsonl`: one JSON object per line, unbuffered, truncated to the step that a run resumes from.

    A line that cannot be written, for example on a full disk, is dropped with a warning instead of ending the run.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        # A new run also drops the evaluation before the first step of a previous run.
        records = _records(path) if resume_step and path.exists() else ()
        kept = [line for line, record in records if record.get("step", 0) <= resume_step]
        temporary = path.with_suffix(".jsonl.tmp")
        try:
            temporary.write_text("".join(kept))
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise ValueError(
                f"train.output_dir: {path} cannot be written ({error.strerror}); free space, or use another folder"
            ) from error
        self._path, self._num_missing = path, 0
        self._file = path.open("ab", buffering=0)
        self._end = path.stat().st_size

    def write(self, metrics: Metrics) -> None:
        line = (json.dumps(_json_safe(metrics)) + "\n").encode()
        reason = "no space left"
        try:
            written = self._file.write(line)
        except OSError as error:
            written, reason = 0, str(error)
        if written == len(line):
            self._end += written
            return
        self._file.truncate(self._end)  # remove the partial line
        if not self._num_missing:
            logger.warning("metrics=%s cannot be written: %s; training continues", self._path, reason)
        self._num_missing += 1

    def close(self) -> None:
        self._file.close()
        if self._num_missing:
            logger.warning("metrics=%s lacks %d lines that could not be written", self._path, self._num_missing)


def _json_safe(metrics: Metrics) -> dict[str, float | int | str | None]:
    """JSON has no NaN or infinity: such values become text, so that the line can still be parsed."""
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in metrics.items()
    }


def read_metrics(path: Path) -> list[Metrics]:
    """The records in the metrics.jsonl at `path`; values that are not finite are NaN or infinite again.

    It may be written to meanwhile.
    """
    return [
        {key: float(value) if isinstance(value, str) else value for key, value in record.items()}
        for _, record in _records(path)
    ]


def is_evaluated(path: Path, step: int) -> bool:
    """Whether the metrics.jsonl at `path` exists and has the evaluation after step `step`."""
    return path.exists() and any(record.get("step") == step and "eval_loss" in record for _, record in _records(path))


def evaluation_losses(path: Path) -> dict[int, float]:
    """The loss of each evaluation in the metrics.jsonl at `path`, by step."""
    if not path.exists():
        return {}
    return {int(record["step"]): float(record["eval_loss"]) for _, record in _records(path) if "eval_loss" in record}


def last_step(path: Path) -> int:
    """The last step in the metrics.jsonl at `path`; 0 if there is none."""
    return max((int(record.get("step", 0)) for _, record in _records(path)), default=0) if path.exists() else 0


def _records(path: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """The lines and their parsed content, skipping a partial line of a run that was killed while writing it."""
    for line in path.read_text().splitlines(keepends=True):
        try:
            yield line, json.loads(line)
        except json.JSONDecodeError:
            continue
