"""A table of the option values that the service does not support.

Values that local training does not support are included, under the service's option names.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from xorl.config.options import all_options, entries_of
from xorl.config.server import ServerConfig
from xorl.config.server_training import in_server_terms, local_path
from xorl.config.unsupported import UnsupportedValues, unsupported_values

NO_EXPERTS = "mixture-of-experts models are not implemented"
SHARED_BASE = "the adapters of all clients share one base, which must not change"

SERVER_UNSUPPORTED: tuple[UnsupportedValues, ...] = (
    UnsupportedValues("router_fp32", NO_EXPERTS, "leave it at true"),
    UnsupportedValues("freeze_router", NO_EXPERTS, "leave it at true"),
    UnsupportedValues("log_router_stats", NO_EXPERTS, "leave it at true"),
    UnsupportedValues("moe_shared_lora", NO_EXPERTS, "leave it at false"),
    UnsupportedValues("moe_hybrid_shared_lora", NO_EXPERTS, "leave it at false"),
    UnsupportedValues(
        "foundation",
        "clients and inference engines read the model's own config.json",
        "edit a copy of config.json and set config_path to its folder",
        for_good=True,
    ),
    UnsupportedValues("merge_lora_interval", SHARED_BASE, "leave it at 0", for_good=True),
    UnsupportedValues("reset_optimizer_on_merge", SHARED_BASE, "leave it at false", for_good=True),
)


@cache
def server_unsupported_values(option: str) -> tuple[UnsupportedValues, ...]:
    """Returns the rows for an option of the service."""
    server_rows = tuple(row for row in SERVER_UNSUPPORTED if row.option == option)
    path = local_path(option)
    shared = () if path is None else unsupported_values(path)
    return server_rows + tuple(
        replace(row, option=option, reason=in_server_terms(row.reason), instead=in_server_terms(row.instead))
        for row in shared
    )


def find_server_unsupported(config: ServerConfig) -> Iterator[tuple[str, str]]:
    """Yields (path, message) for every unsupported value in a configuration."""
    for option in all_options(ServerConfig).values():
        for row in server_unsupported_values(option.path):
            for path, section in entries_of(config, option.section):
                default = type(section).model_fields[option.name].default
                value = getattr(section, option.name)
                if row.rejects(value, default):
                    yield f"{path}.{option.name}".removeprefix("."), row.message(value)
