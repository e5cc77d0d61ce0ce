"""`xorl doctor`: examines the machine before a run does, and says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xorl.cli.arguments import expand_home
from xorl.cli.exit_codes import FAILURE, OK
from xorl.cli.rank import run_alone
from xorl.cli.train import TracebackFlag
from xorl.cli.version import print_versions
from xorl.host.imports import import_torch

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(name="doctor")
def doctor_command(
    output: Annotated[
        Path, typer.Option(callback=expand_home, help="Where runs will write, as in train.output_dir.")
    ] = Path("outputs"),
    traceback: TracebackFlag = False,
) -> None:
    """Examine torch, the host, GPUs and their links, kernels and the disk; takes less than a minute.

    Prints the versions, then a line for each part: ok; warn, for what makes a run slow or end early; or fail, for what
    keeps it from starting. Each warn and fail comes with advice. The exit code is 1 if anything failed.
    """
    raise typer.Exit(run_alone(lambda: _doctor(output), with_traceback=traceback))


def _doctor(output: Path) -> int:
    """Imports torch."""
    import_torch()
    from xorl.train.doctor import findings  # noqa: PLC0415

    print_versions()
    print(flush=True)
    has_failed = False
    for finding in findings(output):
        print(finding, flush=True)
        has_failed = has_failed or finding.status == "fail"
    return FAILURE if has_failed else OK
