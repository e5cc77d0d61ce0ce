"""A table of the capabilities that the service does not have yet, by the options that need them.

What local training refuses is refused here too, under the service's option names.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from xorl.config.options import all_options, entries_of
from xorl.config.refusals import Refusal, refusals_of
from xorl.config.server import ServerConfig
from xorl.config.server_training import in_server_terms, local_path

NO_EXPERTS = "mixture-of-experts models are not built"
SHARED_BASE = "the adapters of all clients stand on one base, which no client may change"

SERVER_REFUSALS: tuple[Refusal, ...] = (
    Refusal("router_fp32", NO_EXPERTS, "leave it at true"),
    Refusal("freeze_router", NO_EXPERTS, "leave it at true"),
    Refusal("log_router_stats", NO_EXPERTS, "leave it at true"),
    Refusal("moe_shared_lora", NO_EXPERTS, "leave it at false"),
    Refusal("moe_hybrid_shared_lora", NO_EXPERTS, "leave it at false"),
    Refusal(
        "foundation",
        "clients and inference servers take the model as its files say it is",
        "edit a copy of config.json and set config_path to its folder",
        for_good=True,
    ),
    Refusal("merge_lora_interval", SHARED_BASE, "leave it at 0", for_good=True),
    Refusal("reset_optimizer_on_merge", SHARED_BASE, "leave it at false", for_good=True),
)


@cache
def server_refusals_of(option: str) -> tuple[Refusal, ...]:
    """Returns the rows for an option of the service."""
    own = tuple(row for row in SERVER_REFUSALS if row.option == option)
    path = local_path(option)
    shared = () if path is None else refusals_of(path)
    return own + tuple(
        replace(row, option=option, reason=in_server_terms(row.reason), instead=in_server_terms(row.instead))
        for row in shared
    )


def server_refused(config: ServerConfig) -> Iterator[tuple[str, str]]:
    """Yields (path, message) for every refused value of a configuration."""
    for option in all_options(ServerConfig).values():
        for row in server_refusals_of(option.path):
            for path, section in entries_of(config, option.section):
                default = type(section).model_fields[option.name].default
                value = getattr(section, option.name)
                if row.refuses(value, default):
                    yield f"{path}.{option.name}".removeprefix("."), row.message(value)
