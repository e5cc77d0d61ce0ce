"""The base of the service: the model as local training builds and places it, before anybody trains on it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from xorl.ckpt import JSON
from xorl.config import Config, ServerConfig, SweepMemberConfig
from xorl.config.server_training import in_server_terms, training_config
from xorl.core import runtime
from xorl.core.mesh import Mesh
from xorl.core.models import Decoder
from xorl.core.parallel import ParallelModel
from xorl.core.runtime import Runtime
from xorl.train.architecture import Architecture
from xorl.train.build import parallel_dims
from xorl.train.checkpoint_model import StartingCheckpoint, describe_model, open_start
from xorl.train.model import build_model, fill_base, head_options_of, read_architecture
from xorl.train.quantization import read_options, scheme_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Base:
    """A placed model and what it was built from.

    Attributes:
        config: the service's, resolved.
        local: the same as local training has it.
        described: what checkpoints say of the model.
        identity: which weights these are, as far as names tell: an adapter over others computes something else.
        fill: gives the base's parameters the values that they began with; collective.
    """

    config: ServerConfig
    local: Config
    architecture: Architecture
    place: Runtime
    mesh: Mesh
    model: ParallelModel
    described: Mapping[str, JSON]
    identity: Mapping[str, JSON]
    fill: Callable[[], None]

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.place.device

    @property
    def module(self) -> Decoder:
        """The decoder, which owns the parameters."""
        assert isinstance(self.model.module, Decoder)
        return self.model.module

    @property
    def output_dir(self) -> Path:
        """Where everything is saved."""
        return Path(self.config.output_dir)

    @property
    def head_options(self) -> dict[str, bool]:
        """How losses compute logits."""
        return head_options_of(self.local.model, self.local.train)


def build_base(config: ServerConfig, place: Runtime) -> Base:
    """Build and place the model in this process's part of the job; collective.

    Raises ValueError that names the option for what the user can correct.
    """
    try:
        return _build(config, place)
    except ValueError as error:
        raise ValueError(in_server_terms(str(error))) from error


def _build(config: ServerConfig, place: Runtime) -> Base:
    local = training_config(config)
    runtime.seed_everything(local.train.seed, place.rank)
    architecture = read_architecture(local.model)
    mesh = Mesh(parallel_dims(local, place.world_size), place.device.type)
    quantization = read_options(local.lora, architecture.hf_config)
    start = _start_of(config, architecture)
    source = None if start is None else start.weights()

    def fill(module: nn.Module) -> None:
        assert isinstance(module, Decoder)
        fill_base(module, architecture, local.model, local.train, quantization, place.device, source)

    lora = local.lora
    if lora.enable_lora:
        # The adapters are a bank's, as those of a sweep are: the base is frozen, and has none of its own.
        lora = lora.model_copy(update={"sweep": [SweepMemberConfig(name="adapter")]})
    model = build_model(architecture, local.model, local.train, lora, mesh, place.device, fill)
    module = model.module
    assert isinstance(module, Decoder)

    def refill() -> None:
        model.drop_gathered()
        fill(module)
        model.drop_gathered()

    described = describe_model(local.model, architecture, scheme_of(module))
    return Base(config, local, architecture, place, mesh, model, described, _identity(config, local), refill)


def _identity(config: ServerConfig, local: Config) -> Mapping[str, JSON]:
    path = config.model_path or config.config_path
    name = config.model_name or (str(Path(path).resolve()) if path is not None and Path(path).exists() else path)
    start = config.load_checkpoint_path
    is_drawn = config.model_path is None and start is None
    return {"name": name, "load_checkpoint_path": start, "seed": local.train.seed if is_drawn else None}


def _start_of(config: ServerConfig, architecture: Architecture) -> StartingCheckpoint | None:
    """The checkpoint whose weights the base starts from in place of the model's own, if it does."""
    if not config.load_checkpoint_path:
        return None
    start = open_start(
        "load_checkpoint_path",
        config.load_checkpoint_path,
        for_adapters="leave it out, and let a client create a model from the adapter's checkpoint",
    )
    start.require_model(architecture, "config_path")
    return start
