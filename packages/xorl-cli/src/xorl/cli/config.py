"""`xorl config show|docs|schema`: shows resolved configurations and documents the options."""

import json
from typing import Annotated

import typer

from xorl.cli.arguments import OverridesCommand
from xorl.cli.train import ConfigPath
from xorl.config import ServerConfig, load_config, load_server_config
from xorl.config.local import Config
from xorl.config.show import documentation, json_schema, show

ServiceFlag = Annotated[
    bool, typer.Option("--service", help="Use the options of `xorl serve` instead of `xorl train`.")
]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Show a resolved configuration, and document the options.",
)


@app.command(name="show", cls=OverridesCommand, short_help="Show a resolved configuration.")
def show_command(ctx: typer.Context, config: ConfigPath, service: ServiceFlag = False) -> None:
    """Print every option of a configuration with the origin of its value, or all problems if it is invalid."""
    overrides = tuple(ctx.obj)
    text = show(load_server_config(config, overrides)) if service else show(load_config(config, overrides))
    print(text, end="")


@app.command(name="docs", short_help="Document the options.")
def docs_command(
    option: Annotated[str | None, typer.Argument(help="An option or a section, such as lr, train.lr or data.")] = None,
    service: ServiceFlag = False,
) -> None:
    """Print the type, default and description of all options, of a section, or of one option."""
    print(documentation(option, ServerConfig if service else Config), end="")


@app.command(name="schema", short_help="Print the JSON schema for editors.")
def schema_command(service: ServiceFlag = False) -> None:
    """Print the JSON schema of configurations, with which editors complete and check them."""
    print(json.dumps(json_schema(ServerConfig if service else Config), indent=2))
