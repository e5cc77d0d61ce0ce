"""Conflicts between the service's own options, and options that require others.

Options of the model and its training are checked as for local training.
"""

import difflib
from collections.abc import Callable, Iterator

from xorl.config.conflicts import MODEL_CHECKS, unmet_needs
from xorl.config.options import all_options, yaml_text
from xorl.config.problems import Conflict
from xorl.config.server import ServerConfig
from xorl.config.server_training import NAMES, SECTIONS, in_server_terms, projected

# Files for an inference engine state it whatever the precision; mixed precision computes in bf16 anyway.
HELD_ANYWAY = {"model.attention_cast_bf16"}
CLIENT_SAYS = {"lr", "weight_decay", "max_grad_norm"}


def server_conflicts(config: ServerConfig) -> Iterator[Conflict]:
    """Yields every conflict of a configuration."""
    local = projected(config)

    def default_of(path: str) -> object:
        section, name = path.split(".")
        if path in NAMES:
            return ServerConfig.model_fields[NAMES[path]].default
        return getattr(getattr(local, section), name)  # the service has no such option

    found = [*unmet_needs(local, default_of), *(conflict for check in MODEL_CHECKS for conflict in check(local))]
    for conflict in found:
        if HELD_ANYWAY.intersection(conflict.paths):
            continue
        paths = tuple(NAMES[path] for path in conflict.paths if path in NAMES)
        yield Conflict(paths, in_server_terms(conflict.message))
    for check in CHECKS:
        yield from check(config)


def elsewhere(path: str) -> str | None:
    """Returns where an option belongs that only local training has."""
    name = path.rpartition(".")[2]
    if path in SECTIONS:
        return f"the options of the service are flat: write those of {path} at the top level"
    own = next((option for option in all_options().values() if option.name == name), None)
    if own is None or "." in path or difflib.get_close_matches(name, ServerConfig.model_fields, n=1, cutoff=0.8):
        return None
    if name in CLIENT_SAYS:
        return f"{name} is an option of `xorl train`; a client of the service says it with each optimizer step"
    if own.path.startswith("data."):
        return f"{name} is an option of `xorl train`; the data of the service is what clients send"
    return f"{name} is an option of `xorl train`, which the service does not have"


def _adapters_are_on(config: ServerConfig) -> Iterator[Conflict]:
    if config.enable_lora or config.enable_qlora:
        return
    for name in ("max_lora_rank", "lora_models_on_device"):
        if getattr(config, name) != ServerConfig.model_fields[name].default:
            yield Conflict((name, "enable_lora"), f"{name} does nothing unless enable_lora is true")


def _adapters_have_their_optimizer(config: ServerConfig) -> Iterator[Conflict]:
    if not (config.enable_lora or config.enable_qlora):
        return
    for name in ("optimizer", "enable_reentrant"):
        default = ServerConfig.model_fields[name].default
        if getattr(config, name) != default:
            message = f"the adapters of the service are trained by AdamW in fp32: leave {name} at {yaml_text(default)}"
            yield Conflict((name, "enable_lora"), message)


def _ranks_are_ordered(config: ServerConfig) -> Iterator[Conflict]:
    if config.max_lora_rank is not None and config.max_lora_rank < config.lora_rank:
        yield Conflict(
            ("max_lora_rank", "lora_rank"),
            f"max_lora_rank is {config.max_lora_rank}, below lora_rank, which is {config.lora_rank}",
        )


def _weights_have_one_source(config: ServerConfig) -> Iterator[Conflict]:
    paths = ("load_weights_mode", "load_checkpoint_path")
    if config.load_weights_mode == "dcp" and not config.load_checkpoint_path:
        yield Conflict(paths, "load_weights_mode is dcp, so load_checkpoint_path has to name the checkpoint")
    if config.load_weights_mode == "safetensors" and config.load_checkpoint_path:
        yield Conflict(paths, "load_checkpoint_path names a checkpoint: set load_weights_mode to auto or dcp")


def _endpoints_differ(config: ServerConfig) -> Iterator[Conflict]:
    seen: set[tuple[str, int]] = set()
    for index, endpoint in enumerate(config.inference_endpoints):
        place = (endpoint.host, endpoint.port)
        if place in seen:
            yield Conflict((f"inference_endpoints.{index}",), f"{place[0]}:{place[1]} is listed already: keep one")
        seen.add(place)


CHECKS: tuple[Callable[[ServerConfig], Iterator[Conflict]], ...] = (
    _adapters_are_on,
    _adapters_have_their_optimizer,
    _ranks_are_ordered,
    _weights_have_one_source,
    _endpoints_differ,
)
