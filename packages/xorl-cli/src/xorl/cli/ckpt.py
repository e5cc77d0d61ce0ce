"""`xorl ckpt ls|verify|prune`: lists, verifies and deletes the checkpoints of a run. No GPU is needed."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from xorl.cli.arguments import expand_home
from xorl.cli.exit_codes import BAD_INPUT, OK
from xorl.cli.rank import run_alone
from xorl.cli.train import TracebackFlag
from xorl.host.imports import import_torch

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="List, verify and delete checkpoints.",
)
RunPath = Annotated[
    Path, typer.Argument(metavar="PATH", callback=expand_home, help="A run's folder, or a single checkpoint.")
]


@dataclass(frozen=True)
class Found:
    """The checkpoints of a run: complete ones by step, those that were set aside, and folders that are neither."""

    root: Path
    complete: list[Path]
    set_aside: list[Path]
    incomplete: list[Path]


@app.command(name="ls")
def ls_command(path: RunPath, traceback: TracebackFlag = False) -> None:
    """Show the checkpoints of a run: size, time, number of ranks and loss on held-out data."""
    raise typer.Exit(run_alone(lambda: _list(path), with_traceback=traceback))


@app.command(name="verify")
def verify_command(path: RunPath, traceback: TracebackFlag = False) -> None:
    """Compare every byte of a run's checkpoints, or of a single one, with the hashes that were recorded.

    The exit code is 2 if any is damaged.
    """
    raise typer.Exit(run_alone(lambda: _verify(path), with_traceback=traceback))


@app.command(name="prune")
def prune_command(
    path: RunPath,
    keep_last: Annotated[int, typer.Option(min=1, help="Number of newest checkpoints to keep.")],
    keep_every: Annotated[int | None, typer.Option(min=1, help="Also keep steps that this number divides.")] = None,
    keep_best: Annotated[int | None, typer.Option(min=1, help="Also keep this many with the lowest loss.")] = None,
    set_aside: Annotated[bool, typer.Option("--set-aside", help="Also delete all that were set aside.")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Delete them; otherwise they are only listed.")] = False,
    traceback: TracebackFlag = False,
) -> None:
    """List or delete old checkpoints of a run, as train.keep_last does during training. The latest always stays."""
    raise typer.Exit(
        run_alone(
            lambda: _prune(path, (keep_last, keep_every, keep_best), set_aside=set_aside, delete=delete),
            with_traceback=traceback,
        )
    )


def _find(path: Path) -> Found:
    """Raises ValueError if there is no checkpoint at or below `path`."""
    from xorl.ckpt.layout import MANIFEST, SET_ASIDE, is_complete, list_checkpoints, step_of  # noqa: PLC0415

    if is_complete(path):
        return Found(path.absolute().parent, [path.absolute()], [], [])
    for root in (path.absolute() / "checkpoints", path.absolute()):
        aside = [folder for each in sorted(root.glob(f"{SET_ASIDE}*")) for folder in list_checkpoints(each)]
        folders = [folder for folder in root.glob("*step_*") if step_of(folder) is not None]
        incomplete = sorted(folder for folder in folders if not is_complete(folder))
        if folders or aside:
            return Found(root, list_checkpoints(root), aside, incomplete)
    raise ValueError(f"PATH: {path} is neither a checkpoint, which has a {MANIFEST}, nor the folder of a run with one")


def _list(path: Path) -> int:
    """Imports torch."""
    import_torch()
    from xorl.ckpt import CheckpointError, read_manifest  # noqa: PLC0415
    from xorl.ckpt.layout import latest_checkpoint  # noqa: PLC0415
    from xorl.train.observe.metrics_file import evaluation_losses  # noqa: PLC0415
    from xorl.train.output_dir import METRICS  # noqa: PLC0415

    found = _find(path)
    latest, losses = latest_checkpoint(found.root), evaluation_losses(found.root.parent / METRICS)
    rows = [("checkpoint", "GiB", "saved", "ranks", "held-out loss", "")]
    for folder in [*found.complete, *found.set_aside]:
        name = str(folder.relative_to(found.root))
        saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.stat().st_mtime))
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            rows.append((name, "", saved, "", "", str(error).splitlines()[0]))
            continue
        size = sum(record.size for record in manifest.files.values()) / 2**30
        loss = losses.get(manifest.step) if folder in found.complete else None
        note = "latest" if folder == latest else ""
        row = (name, f"{size:.3f}", saved, str(manifest.world_size), "" if loss is None else f"{loss:.4f}", note)
        rows.append(row)
    rows += [(folder.name, "", "", "", "", "not complete") for folder in found.incomplete]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, [*widths, 0], strict=True)).rstrip())
    return OK


def _verify(path: Path) -> int:
    """Imports torch."""
    import_torch()
    from xorl.ckpt import CheckpointError  # noqa: PLC0415
    from xorl.ckpt.layout import verify  # noqa: PLC0415

    found = _find(path)
    num_damaged = len(found.incomplete)
    intact: list[Path] = []
    for folder in [*found.complete, *found.set_aside]:
        try:
            manifest = verify(folder)
        except CheckpointError as error:
            num_damaged += 1
            print(f"damaged  {error}")
            continue
        intact.append(folder)
        print(f"ok       {folder} ({len(manifest.files)} files)", flush=True)
    for folder in found.incomplete:
        print(f"damaged  {folder} is not complete")
    if num_damaged and (usable := [folder for folder in intact if folder in found.complete]):
        print(f"The newest intact checkpoint: --train.load_checkpoint_path {usable[-1]}", file=sys.stderr)
    return BAD_INPUT if num_damaged else OK


def _prune(path: Path, keep: tuple[int, int | None, int | None], *, set_aside: bool, delete: bool) -> int:
    """Imports torch."""
    import_torch()
    from xorl.ckpt import Retention  # noqa: PLC0415
    from xorl.ckpt.layout import is_complete, latest_checkpoint, step_of  # noqa: PLC0415
    from xorl.ckpt.publish import remove, remove_leftovers  # noqa: PLC0415
    from xorl.train.observe.metrics_file import evaluation_losses  # noqa: PLC0415
    from xorl.train.output_dir import METRICS, locked  # noqa: PLC0415

    if is_complete(path):
        raise ValueError(f"PATH: {path} is a single checkpoint; give the folder of its run")
    run_folder = _find(path).root.parent
    with locked(run_folder) if delete else nullcontext():
        found = _find(path)
        last, every, best = keep
        retention = Retention(last, every, best, lambda: evaluation_losses(run_folder / METRICS))
        kept = retention.kept([step for folder in found.complete if (step := step_of(folder)) is not None])
        latest = latest_checkpoint(found.root)
        old = [folder for folder in found.complete if step_of(folder) not in kept and folder != latest]
        pruned = [*old, *(found.set_aside if set_aside else ())]
        for folder in pruned:
            if delete:
                remove(folder)
            print(f"{'deleted' if delete else 'would delete'}  {folder}", flush=True)
        if not pruned:
            print(f"nothing to delete: these options keep all {len(found.complete)} checkpoints", file=sys.stderr)
        if delete:
            remove_leftovers(found.root)
            _remove_empty(found)
    return OK


def _remove_empty(found: Found) -> None:
    for folder in {checkpoint.parent for checkpoint in found.set_aside}:
        if not any(folder.iterdir()):
            folder.rmdir()
