"""Command lines that mix a command's flags with `--section.field value` overrides."""

from __future__ import annotations

import difflib
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer.core import TyperCommand

from xorl.cli.exit_codes import error_text, exit_code_of
from xorl.config.fields import Section
from xorl.config.local import Config
from xorl.config.options import all_options, find_option
from xorl.config.overrides import is_override, split_overrides
from xorl.config.server import ServerConfig

if TYPE_CHECKING:
    # Typer uses this type in its signatures but does not export it.
    from typer._click.core import Context


class OverridesCommand(TyperCommand):
    """A command that collects override arguments in `ctx.obj` and parses the rest."""

    root: type[Section] = Config
    prefix = ""
    usage = "--section.field"

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        overrides, rest = split_overrides(args)
        ctx.obj = overrides
        parameters = self.get_params(ctx)
        flags = {flag for parameter in parameters for flag in (*parameter.opts, *parameter.secondary_opts)}
        switches = {flag for parameter in parameters if getattr(parameter, "is_flag", False) for flag in parameter.opts}
        known = [self._known_flag(argument, flags) for argument in rest]
        for before, argument in pairwise(["", *known]):
            if before not in flags - switches:  # otherwise this is the value of a flag
                self._reject_bare_option(argument)
        return super().parse_args(ctx, known)

    def collect_usage_pieces(self, ctx: Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), f"[{self.usage} VALUE]..."]

    def _known_flag(self, argument: str, flags: set[str]) -> str:
        """Returns a flag with underscores replaced by dashes. Raises ValueError for an unknown flag."""
        if not argument.startswith("--") or argument == "--" or is_override(argument):
            return argument
        name, equals, value = argument.partition("=")
        flag = f"--{name[2:].replace('_', '-')}"
        if flag not in flags:
            raise ValueError(f"unknown flag {name}{self._suggestion(flag, flags)}")
        return f"{flag}{equals}{value}"

    def _reject_bare_option(self, argument: str) -> None:
        name, equals, _ = argument.partition("=")
        if equals and find_option(name.removeprefix(self.prefix), self.root):
            raise ValueError(f"options start with two dashes: write --{argument}")

    def _suggestion(self, flag: str, flags: set[str]) -> str:
        name = flag.removeprefix("--").replace("-", "_")
        # Fields of list entries, such as datasets[].path, are not options of the command line.
        options = [
            option.path for option in all_options(self.root).values() if option.name == name and "[]" not in option.path
        ]
        near = difflib.get_close_matches(flag, flags, n=1, cutoff=0.7)
        if options:
            return f"; did you mean the option --{self.prefix}{options[0]}?"
        return f"; did you mean {near[0]}?" if near else ""


class ServiceOverridesCommand(OverridesCommand):
    """An OverridesCommand for options of the service."""

    root = ServerConfig
    prefix = "server."
    usage = "--server.field"


def expand_home(path: Path | None) -> Path | None:
    """Callback for path flags: expands ~ at the start, which no shell does after `--flag=`."""
    return None if path is None else Path(os.path.expanduser(path))


def run_module(app: typer.Typer, module: str) -> None:
    """Runs a single command for `python -m module`; invalid input prints a message and exits with its exit code."""
    try:
        app(prog_name=f"python -m {module}")
    except ValueError as error:
        print(error_text(error), file=sys.stderr)
        sys.exit(exit_code_of(error))
