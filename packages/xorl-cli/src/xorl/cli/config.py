"""`xorl config show|docs|schema`: what a configuration resolves to, and what the options are."""

import json
from typing import Annotated

import typer

from xorl.cli.arguments import OverridesCommand
from xorl.cli.train import ConfigPath
from xorl.config import load_config
from xorl.config.docs import documentation, json_schema
from xorl.config.show import show

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Look at a configuration and at the options there are.",
)


@app.command(name="show", cls=OverridesCommand, short_help="What a configuration resolves to.")
def show_command(ctx: typer.Context, config: ConfigPath) -> None:
    """Print every option of a configuration and where its value is from; prints all that is wrong with it instead."""
    print(show(load_config(config, tuple(ctx.obj))), end="")


@app.command(name="docs", short_help="What the options mean.")
def docs_command(
    option: Annotated[
        str | None, typer.Argument(help="An option or a section, such as lr or train.lr or data.")
    ] = None,
) -> None:
    """Print type, default and meaning of all options, of a section or of one."""
    print(documentation(option), end="")


@app.command(name="schema", short_help="JSON schema for editors.")
def schema_command() -> None:
    """Print the JSON schema of configurations, by which an editor completes and checks them."""
    print(json.dumps(json_schema(), indent=2))
