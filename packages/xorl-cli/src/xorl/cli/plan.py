"""`xorl plan config.yaml`: the memory and speed of a run, and of similar layouts, without its GPUs or weights."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from xorl.cli.arguments import OverridesCommand, run_module
from xorl.cli.exit_codes import OK
from xorl.cli.rank import run_alone
from xorl.cli.train import ConfigPath, TracebackFlag, let_idle_threads_sleep
from xorl.config import load_config
from xorl.host.imports import import_torch

MODULE = "xorl.cli.plan"

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(name="plan", cls=OverridesCommand)
def plan_command(
    ctx: typer.Context,
    config: ConfigPath,
    gpus: Annotated[int, typer.Option(help="GPUs of one host.")] = 1,
    gpu: Annotated[str, typer.Option(help="GPU model: h100 or h200.")] = "h100",
    tokens: Annotated[
        float | None, typer.Option(help="Tokens of the run, such as 1e9. [those of train.max_steps, if it is set]")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a document. [data.sample_packing_sequence_len]")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Show all layouts, not only the best ones.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: seconds, bytes and options.")] = False,
    traceback: TracebackFlag = False,
) -> None:
    """Predict memory, tokens/s and time of a run, for its configuration and for similar layouts, best first.

    Needs neither GPUs nor weights nor data. Layouts differ in the sizes of fsdp, tp, pp, ep, ulysses and ring, in
    micro-batches and in recomputation; the rows of a step stay the same. What does not fit into memory comes last.
    """
    overrides: tuple[str, ...] = tuple(ctx.obj)
    let_idle_threads_sleep()

    def start() -> int:
        loaded = load_config(config, overrides)
        import_torch()
        from xorl.train.model_source import read_architecture  # noqa: PLC0415
        from xorl.train.plan import plan, rates, text  # noqa: PLC0415

        with loaded.citing():
            measured = rates.rates_of(gpu)
            train, row_tokens = loaded.config.train, loaded.config.data.sample_packing_sequence_len
            architecture = read_architecture(
                loaded.config.model, train.load_weights_mode, loaded.config.lora.adapter_path
            )
            plan.check_plannable(loaded.config, architecture, gpus)
            made = plan.make_plan(config, overrides, loaded.config, architecture, measured, gpus, length or row_tokens)
        of_run = tokens
        if of_run is None and train.max_steps is not None and made.rows:
            of_run = float(train.max_steps * made.rows[0].tokens_per_step)
        if as_json:
            print(json.dumps(text.as_json(made, measured, gpus, of_run), indent=1))
        else:
            num_shown = len(made.rows) if every else text.SHOWN
            print(text.as_text(made, measured, gpus, of_run, num_shown=num_shown))
        return OK

    raise typer.Exit(run_alone(start, with_traceback=traceback))


if __name__ == "__main__":
    run_module(app, MODULE)
