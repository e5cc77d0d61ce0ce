"""The command `xorl`. Commands are imported by name when they are called, so that `--help` stays fast."""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import typer
from typer.core import TyperGroup
from typer.main import get_command

from xorl.cli.exit_codes import error_text, exit_code_of

if TYPE_CHECKING:
    # Typer uses these types in its signatures but does not export them.
    from typer._click.core import Command, Context
    from typer._click.formatting import HelpFormatter


@dataclass(frozen=True)
class Entry:
    """A command: the module with its `app`, its group in the list of commands, and its help text."""

    module: str
    group: str
    help: str


COMMANDS: dict[str, Entry] = {
    "train": Entry("xorl.cli.train", "Training", "Train a model from a configuration."),
    "bench": Entry(
        "xorl.cli.bench", "Training", "Measure the training speed of a configuration or a known model shape."
    ),
    "plan": Entry("xorl.cli.plan", "Training", "Predict the memory and speed of a run, without its GPUs."),
    "verify": Entry(
        "xorl.cli.verify", "Training", "Verify that a configuration's layout computes what one process computes."
    ),
    "export": Entry("xorl.cli.export", "Training", "Export a checkpoint or an adapter for other tools."),
    "chat": Entry("xorl.cli.chat", "Training", "Talk to a trained model, or complete the prompts in a file."),
    "report": Entry("xorl.cli.report", "Training", "Write a page about one or several runs."),
    "ckpt": Entry("xorl.cli.ckpt", "Training", "List, verify and delete checkpoints."),
    "serve": Entry("xorl.cli.serve", "Service", "Serve training and sampling to clients, or show a service's status."),
    "data": Entry("xorl.cli.data", "Data", "Prepare and inspect training data."),
    "config": Entry("xorl.cli.config", "Configuration", "Show a resolved configuration, and document options."),
    "doctor": Entry("xorl.cli.doctor", "About", "Examine the machine, and say what to do."),
    "version": Entry("xorl.cli.version", "About", "Print versions and devices."),
}


class CommandsByName(TyperGroup):
    """A group that imports its commands when they are called."""

    def list_commands(self, ctx: Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        if cmd_name not in COMMANDS:
            near = difflib.get_close_matches(cmd_name, COMMANDS, n=1)
            ctx.fail(f"no such command: {cmd_name!r}{f'; did you mean {near[0]}?' if near else ''}")
        return get_command(import_module(COMMANDS[cmd_name].module).app)

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        for group in dict.fromkeys(entry.group for entry in COMMANDS.values()):
            with formatter.section(group):
                formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items() if entry.group == group])


app = typer.Typer(
    cls=CommandsByName,
    add_completion=False,
    no_args_is_help=True,
    # Without rich, help takes half the time and reads the same in a log file.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done, 1 failed, 2 bad input, 3 training diverged, 130 and 143 interrupted.",
)


@app.callback()
def root() -> None:
    """Train large language models: xorl train config.yaml, or xorl serve config.yaml to serve clients."""


def main() -> None:
    """Runs the command line and exits."""
    try:
        app()
    except ValueError as error:
        print(error_text(error), file=sys.stderr)
        sys.exit(exit_code_of(error))
