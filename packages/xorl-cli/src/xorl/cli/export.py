"""`xorl export`: converts a checkpoint or an adapter for transformers or PEFT. No GPU is needed."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from xorl.cli.arguments import expand_home
from xorl.cli.rank import run_alone
from xorl.cli.train import TracebackFlag
from xorl.host.imports import import_torch

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class ExpertForms(StrEnum):
    """The forms of adapters on experts."""

    per_expert = "per_expert"
    peft = "peft"
    sglang = "sglang"


class Precision(StrEnum):
    """Dtypes that weights can be written in."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


@app.command(name="export")
def export_command(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A checkpoint, a run's folder (for its newest checkpoint), or an adapter: folder or Hub id.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(callback=expand_home, help="Folder to create; required for a Hub id. [beside PATH]")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter into its base model.")] = False,
    dtype: Annotated[Precision | None, typer.Option(help="Precision of the weights. [as stored]")] = None,
    base: Annotated[
        str | None, typer.Option(help="Base model of an adapter: folder or Hub id. [as given in PATH]")
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="First load the result in transformers (an adapter in PEFT, if PEFT can read it) and compare logits.",
        ),
    ] = False,
    moe_lora_format: Annotated[
        ExpertForms | None,
        typer.Option(help="Form of adapters on experts: see lora.moe_lora_format. [as in PATH]"),
    ] = None,
    traceback: TracebackFlag = False,
) -> None:
    """Write a model that transformers loads, or an adapter that PEFT loads, with a README.md.

    A checkpoint becomes a model. A checkpoint with an adapter becomes only the adapter, or with --merge the model with
    the adapter merged in. One tensor is in memory at a time; --verify loads the whole model.
    """
    raise typer.Exit(
        run_alone(lambda: _export(path, output, merge, dtype, base, verify, moe_lora_format), with_traceback=traceback)
    )


def _export(
    path: str,
    output: Path | None,
    merge: bool,
    dtype: Precision | None,
    base: str | None,
    verify: bool,
    form: ExpertForms | None,
) -> int:
    """Runs the export. Imports torch."""
    import_torch()
    import torch  # noqa: PLC0415

    from xorl.train.export.saved import export_saved  # noqa: PLC0415
    from xorl.train.observe.progress import set_up_logging  # noqa: PLC0415

    dtypes = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    set_up_logging("progress_bar", "INFO", is_main=True)
    folder = export_saved(
        path,
        None if output is None else str(output),
        base=base,
        merge=merge,
        dtype=dtypes[dtype],
        verify=verify,
        form=None if form is None else form.value,
    )
    print(folder)
    return 0
