"""Reads the folder of a run, which may still be running: metrics, receipt, options, checkpoints, failed steps."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from xorl.ckpt.layout import JSON, list_checkpoints
from xorl.train.observe.diverged import REPORT
from xorl.train.observe.metrics_file import Metrics, read_metrics
from xorl.train.observe.run_file import RUN
from xorl.train.output_dir import MEMBERS, METRICS, RECEIPT

Object = Mapping[str, JSON]


@dataclass(frozen=True)
class RunRecord:
    """The records that a run, or a member of a sweep, has written so far, in the order of their steps.

    Attributes:
        name: short, and different from those of the other runs on the page.
        steps, evaluations: the records of metrics.jsonl.
        nonfinite: the steps whose loss or gradient was not finite.
        receipt, about: the contents of data_receipt.json and run.json; empty without the file.
        checkpoints: the names of complete ones, oldest first.
        written: when metrics.jsonl was last written, in seconds since the epoch.
    """

    name: str
    folder: Path
    steps: Sequence[Metrics]
    evaluations: Sequence[Metrics]
    nonfinite: Sequence[Object]
    receipt: Object
    about: Object
    checkpoints: Sequence[str]
    written: float | None

    def values(self, key: str) -> list[tuple[int, float]]:
        """The values of a metric by step, in steps or evaluations; steps without it are left out."""
        records = self.evaluations if key.startswith("eval_") else self.steps
        return [
            (int(record["step"] or 0), float(value))
            for record in records
            if (value := record.get(key)) is not None and record.get("step") is not None
        ]


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """The runs in `folders`; a sweep is followed by its members.

    Raises ValueError, naming PATH, if a folder holds no run or a damaged file.
    """
    absolute = [folder.absolute() for folder in folders]
    for index, folder in enumerate(absolute):
        if folder in absolute[:index]:
            raise ValueError(f"PATH: {folder} is given twice")
        if not any((folder / name).is_file() for name in (METRICS, RUN, RECEIPT)):
            reason = f"it has no {METRICS}" if folder.is_dir() else "it is not a folder"
            raise ValueError(f"PATH: {folders[index]} is not the train.output_dir of a run: {reason}")
    common = Path(os.path.commonpath([folder.parent for folder in absolute]))
    runs: list[RunRecord] = []
    for folder in absolute:
        name = str(folder.relative_to(common))
        runs += [_read_run(name, folder), *_members(name, folder)]
    return runs


def _members(name: str, folder: Path) -> Iterator[RunRecord]:
    for metrics in sorted((folder / MEMBERS).glob(f"*/{METRICS}")):
        yield _read_run(f"{name}/{metrics.parent.name}", metrics.parent)


def _read_run(name: str, folder: Path) -> RunRecord:
    metrics = folder / METRICS
    records = read_metrics(metrics) if metrics.exists() else []
    return RunRecord(
        name,
        folder,
        [record for record in records if not _is_evaluation(record)],
        [record for record in records if _is_evaluation(record)],
        list(_lines(folder / REPORT)),
        _object(folder / RECEIPT),
        _object(folder / RUN),
        [path.name for path in list_checkpoints(folder / "checkpoints")],
        metrics.stat().st_mtime if metrics.exists() else None,
    )


def _is_evaluation(record: Metrics) -> bool:
    return any(key.startswith("eval_") for key in record)


def _object(file: Path) -> Object:
    if not file.exists():
        return {}
    try:
        content: object = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"PATH: {file}:{error.lineno} is not JSON: {error.msg}") from error
    if not isinstance(content, dict):
        raise ValueError(f"PATH: {file} is not a JSON object")
    return cast(Object, content)


def _lines(file: Path) -> Iterator[Object]:
    """The objects in the lines of a file, without a partial line at its end."""
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue
