"""`xorl config show|docs|schema`: what a configuration resolves to, and what the options are."""

import json
from typing import Annotated

import typer

from xorl.cli.arguments import OverridesCommand
from xorl.cli.train import ConfigPath
from xorl.config import ServerConfig, load_config, load_server_config
from xorl.config.docs import documentation, json_schema
from xorl.config.local import Config
from xorl.config.show import show

ServiceFlag = Annotated[bool, typer.Option("--service", help="The options of `xorl serve`, not of `xorl train`.")]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Show a configuration, and explain the options.",
)


@app.command(name="show", cls=OverridesCommand, short_help="What a configuration resolves to.")
def show_command(ctx: typer.Context, config: ConfigPath, service: ServiceFlag = False) -> None:
    """Print every option of a configuration and where its value is from; prints all that is wrong with it instead."""
    overrides = tuple(ctx.obj)
    text = show(load_server_config(config, overrides)) if service else show(load_config(config, overrides))
    print(text, end="")


@app.command(name="docs", short_help="What the options mean.")
def docs_command(
    option: Annotated[
        str | None, typer.Argument(help="An option or a section, such as lr or train.lr or data.")
    ] = None,
    service: ServiceFlag = False,
) -> None:
    """Print type, default and meaning of all options, of a section or of one."""
    print(documentation(option, ServerConfig if service else Config), end="")


@app.command(name="schema", short_help="JSON schema for editors.")
def schema_command(service: ServiceFlag = False) -> None:
    """Print the JSON schema of configurations, by which an editor completes and checks them."""
    print(json.dumps(json_schema(ServerConfig if service else Config), indent=2))
