"""`xorl report outputs/my_run`: writes a page about runs, which may still be running. No GPU is needed."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from xorl.cli.arguments import expand_home
from xorl.cli.exit_codes import OK
from xorl.cli.rank import run_alone
from xorl.cli.train import TracebackFlag
from xorl.host.imports import import_torch

REPORT = "report.html"

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(name="report")
def report_command(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="The folders of runs (train.output_dir).")],
    output: Annotated[
        Path | None,
        typer.Option(callback=expand_home, help=f"HTML file to write. [{REPORT} in the first folder]"),
    ] = None,
    traceback: TracebackFlag = False,
) -> None:
    """Write one HTML page with the losses, speed, data and options of runs, and with what differs between them.

    It needs no other files and no network. A run may still be training: the page shows what it has written so far.
    """
    raise typer.Exit(run_alone(lambda: _report(paths, output), with_traceback=traceback))


def _report(paths: list[Path], output: Path | None) -> int:
    """Imports torch."""
    import_torch()
    from xorl.train.report.page import report_page  # noqa: PLC0415
    from xorl.train.report.read import read_runs  # noqa: PLC0415

    folders = [path.expanduser() for path in paths]
    page = report_page(read_runs(folders), datetime.now().astimezone())
    file = folders[0] / REPORT if output is None else output
    temporary = file.with_name(f"{file.name}.tmp")
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        with suppress(OSError):  # a file system that is read-only refuses this too
            temporary.unlink(missing_ok=True)
        raise ValueError(f"--output: {file} cannot be written ({error.strerror}); name another file") from error
    print(file)
    return OK
