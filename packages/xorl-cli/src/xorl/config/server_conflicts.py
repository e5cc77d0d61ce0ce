"""Conflicts between options of the service, and a table of the values that it does not support.

The options of the model and its training are checked as for local training, under the service's option names.
"""

import difflib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from ipaddress import ip_network

from xorl.config.conflicts import MODEL_CHECKS
from xorl.config.local import Config
from xorl.config.options import all_options, entries_of, yaml_text
from xorl.config.problems import Conflict
from xorl.config.requirements import WithoutEffect, unmet_requirements, value_at, without_effect
from xorl.config.server import HOST_NAME, ServerConfig
from xorl.config.server_training import (
    SECTIONS,
    SERVER_NAMES,
    in_server_terms,
    local_path,
    unresolved_local_config,
)
from xorl.config.unsupported import UnsupportedValues, unsupported_values

SENT_BY_CLIENT = {"lr", "weight_decay", "max_grad_norm"}

SHARED_BASE = "the adapters of all clients share one base, which must not change"

SERVER_UNSUPPORTED: tuple[UnsupportedValues, ...] = (
    UnsupportedValues(
        "foundation",
        "clients and inference engines read the model's own config.json",
        "edit a copy of config.json and set config_path to its folder",
    ),
    UnsupportedValues(
        "encoders",
        "clients and inference engines read one folder, and the service has no images yet",
        "leave it at {}",
    ),
    UnsupportedValues("merge_lora_interval", SHARED_BASE, "leave it at 0"),
    UnsupportedValues("reset_optimizer_on_merge", SHARED_BASE, "leave it at false"),
)


def server_without_effect(config: ServerConfig) -> tuple[ServerConfig, list[WithoutEffect]]:
    """Returns the configuration with every option that has no effect at its default, and the list of these options."""
    local = unresolved_local_config(config)
    _, local_options = without_effect(local, partial(_default_of, local))
    found = [
        WithoutEffect(SERVER_NAMES[option.path], option.value, in_server_terms(option.condition))
        for option in local_options
    ]
    if not config.has_adapters:
        found += [
            WithoutEffect(name, getattr(config, name), "unless enable_lora is true")
            for name in ("max_lora_rank", "lora_models_on_device")
            if getattr(config, name) != _server_default(name)
        ]
    return config.model_copy(update={option.path: _server_default(option.path) for option in found}), found


def server_conflicts(config: ServerConfig) -> Iterator[Conflict]:
    """Yields every conflict of a configuration whose options without effect are at their defaults."""
    local = unresolved_local_config(config)
    shared = unmet_requirements(local, partial(_default_of, local))
    for conflict in [*shared, *(conflict for check in MODEL_CHECKS for conflict in check(local))]:
        paths = tuple(SERVER_NAMES[path] for path in conflict.paths if path in SERVER_NAMES)
        yield Conflict(paths, in_server_terms(conflict.message))
    for check in CHECKS:
        yield from check(config)


def _default_of(local: Config, path: str) -> object:
    """The service's default of a local option; the value itself if the service does not have the option."""
    return _server_default(SERVER_NAMES[path]) if path in SERVER_NAMES else value_at(local, path)


def _server_default(name: str) -> object:
    return ServerConfig.model_fields[name].default


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


def unknown_option_hint(path: str) -> str | None:
    """Explains an unknown option that exists only in local training; None for any other."""
    name = path.rpartition(".")[2]
    if path in SECTIONS:
        return f"the options of the service have no sections: write those of {path} at the top level"
    local = next((option for option in all_options().values() if option.name == name), None)
    if local is None or "." in path or difflib.get_close_matches(name, ServerConfig.model_fields, n=1, cutoff=0.8):
        return None
    if name in SENT_BY_CLIENT:
        return f"{name} is an option of `xorl train`; clients of the service send it with each optimizer step"
    if local.path.startswith("data."):
        return f"{name} is an option of `xorl train`; the service trains on the data that clients send"
    return f"{name} is an option of `xorl train` that the service does not have"


def _adapters_use_the_default_optimizer(config: ServerConfig) -> Iterator[Conflict]:
    if not config.has_adapters:
        return
    for name in ("optimizer", "enable_reentrant"):
        default = ServerConfig.model_fields[name].default
        if getattr(config, name) != default:
            message = f"the service trains adapters by AdamW in fp32: set {name} to {yaml_text(default)}"
            yield Conflict((name, "enable_lora"), message)


def _adapters_leave_routers(config: ServerConfig) -> Iterator[Conflict]:
    if config.has_adapters and not config.freeze_router:
        message = "adapters do not train routers: leave freeze_router at true, or set enable_lora to false"
        yield Conflict(("freeze_router", "enable_lora"), message)


def _adapters_are_on_whole_matrices(config: ServerConfig) -> Iterator[Conflict]:
    if config.has_adapters and config.tensor_parallel_size > 1:
        message = (
            "ranks share matrices only with full weights: set enable_lora to false, or leave tensor_parallel_size at "
            "1; data_parallel_mode: fsdp2 shards models that do not fit on one GPU"
        )
        yield Conflict(("tensor_parallel_size", "enable_lora"), message)


def _lora_ranks_are_ordered(config: ServerConfig) -> Iterator[Conflict]:
    if config.max_lora_rank is not None and config.max_lora_rank < config.lora_rank:
        yield Conflict(
            ("max_lora_rank", "lora_rank"),
            f"max_lora_rank ({config.max_lora_rank}) is below lora_rank ({config.lora_rank})",
        )


def _weights_have_one_source(config: ServerConfig) -> Iterator[Conflict]:
    paths = ("load_weights_mode", "load_checkpoint_path")
    if config.load_weights_mode == "dcp" and not config.load_checkpoint_path:
        yield Conflict(paths, "load_weights_mode: dcp needs load_checkpoint_path, the checkpoint to load")
    if config.load_weights_mode == "safetensors" and config.load_checkpoint_path:
        yield Conflict(paths, "load_checkpoint_path is set: set load_weights_mode to auto or dcp")


def _endpoints_are_distinct(config: ServerConfig) -> Iterator[Conflict]:
    seen: set[tuple[str, int]] = set()
    for index, endpoint in enumerate(config.inference_endpoints):
        address = (endpoint.host, endpoint.port)
        if address in seen:
            yield Conflict((f"inference_endpoints.{index}",), f"{address[0]}:{address[1]} is listed twice: remove one")
        seen.add(address)


def _allowed_hosts_are_hosts(config: ServerConfig) -> Iterator[Conflict]:
    for index, entry in enumerate(config.allowed_inference_hosts or []):
        if HOST_NAME.fullmatch(entry):
            continue
        try:
            ip_network(entry)
        except ValueError as problem:
            message = f"expected a host name, an address or a network such as 10.0.0.0/8: {problem}"
            yield Conflict((f"allowed_inference_hosts.{index}",), message)


CHECKS: tuple[Callable[[ServerConfig], Iterator[Conflict]], ...] = (
    _adapters_use_the_default_optimizer,
    _adapters_leave_routers,
    _adapters_are_on_whole_matrices,
    _lora_ranks_are_ordered,
    _weights_have_one_source,
    _endpoints_are_distinct,
    _allowed_hosts_are_hosts,
)
