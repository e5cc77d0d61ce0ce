"""The base model of the service, built and placed on the ranks as in local training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from xorl.ckpt.layout import JSON
from xorl.config import Config, ServerConfig
from xorl.config.arguments import in_options
from xorl.config.entries import SweepMemberConfig
from xorl.config.server_training import in_server_terms, training_config
from xorl.core.mesh import Mesh
from xorl.core.models import Decoder
from xorl.core.parallel import ParallelModel
from xorl.core.runtime import Runtime, seed_everything
from xorl.server.addresses import SERVICE_FOLDER
from xorl.train.architecture import Architecture
from xorl.train.base_weights import base_fingerprint
from xorl.train.checkpoint_model import base_options, describe_model, open_start
from xorl.train.export.rest import Rest
from xorl.train.model import build_model, fill_base, stage_of
from xorl.train.model_source import MODEL_PATH, read_architecture
from xorl.train.parallel_sizes import check_experts, check_shared_matrices, check_stages
from xorl.train.quantization import read_options, scheme_of
from xorl.train.startup import parallel_dims
from xorl.train.transports import ChoicesFile
from xorl.train.watchdog import Position

logger = logging.getLogger(__name__)

# Options that only a mixture of experts has.
EXPERT_OPTIONS = (
    "moe_implementation",
    "router_fp32",
    "freeze_router",
    "log_router_stats",
    "expert_parallel_size",
)


@dataclass(frozen=True)
class Base:
    """The base model on its devices, with the configuration that it was built from.

    Attributes:
        config: the service's configuration, resolved.
        local: the equivalent configuration of local training.
        described: the description of the model in checkpoints.
        identity: the origin of the base weights (name, checkpoint, seed, fingerprint). An adapter is valid only over
            the base that it was trained on; adapter checkpoints record this and loading compares it.
        rest: what exports take from the folder of the base weights.
        fill: resets the base's parameters to their initial values; collective.
        position: this rank's progress, for the watchdog. Long operations move it as they advance.
    """

    config: ServerConfig
    local: Config
    architecture: Architecture
    rest: Rest
    runtime: Runtime
    mesh: Mesh
    model: ParallelModel
    described: Mapping[str, JSON]
    identity: Mapping[str, JSON]
    fill: Callable[[], None]
    position: Position

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.runtime.device

    @property
    def module(self) -> Decoder:
        """The decoder, which owns the parameters."""
        assert isinstance(self.model.module, Decoder)
        return self.model.module

    @property
    def output_dir(self) -> Path:
        """The folder of all checkpoints and exports."""
        return Path(self.config.output_dir)


def build_base(config: ServerConfig, runtime: Runtime, position: Position | None = None) -> Base:
    """Build the model and place this rank's part of it; collective. `position` is this rank's, if it is watched.

    Raises ValueError, with the name of the option, for errors in the configuration.
    """
    try:
        return _build(config, runtime, position or Position(step=None))
    except ValueError as error:
        raise ValueError(in_server_terms(in_options(str(error)))) from error


def _build(config: ServerConfig, runtime: Runtime, position: Position) -> Base:
    local = training_config(config)
    architecture = read_architecture(local.model)
    fields = ServerConfig.model_fields
    options = {name: (getattr(config, name), fields[name].default) for name in EXPERT_OPTIONS}
    check_experts(architecture.config, local.train, options)
    check_shared_matrices(architecture.config, local.train)
    check_stages(architecture.config, local.train)
    mesh = Mesh(parallel_dims(local, runtime.world_size), runtime.device.type)
    logger.info("%s", mesh.describe())
    # Ranks with different tokens draw different dropout masks.
    seed_everything(local.train.seed, mesh.losses.rank)
    quantization = read_options(local.lora, architecture.hf_config)
    source = None
    if config.load_checkpoint_path:
        start = open_start(
            "load_checkpoint_path",
            config.load_checkpoint_path,
            for_adapters="leave it out and create a model from the adapter's checkpoint as a client",
        )
        start.require_model(architecture, "config_path")
        source = start.weights()
        architecture = replace(architecture, origin=start.description.architecture.origin)
    rest = Rest.of(architecture)

    def fill(module: nn.Module) -> None:
        assert isinstance(module, Decoder)
        fill_base(module, architecture, local.model, local.train, quantization, runtime.device, source)

    lora = local.lora
    if lora.enable_lora:
        # As in a sweep, the base is frozen and has no adapter itself: all adapters are in a bank.
        lora = lora.model_copy(update={"sweep": [SweepMemberConfig(name="adapter")]})
    choices = ChoicesFile(Path(config.output_dir) / SERVICE_FOLDER / "fsdp_collectives.json")
    choices.keep()
    stage = stage_of(local, architecture, mesh)
    model = build_model(architecture, local.model, local.train, lora, mesh, runtime.device, fill, stage=stage)
    choices.write()
    module = model.module
    assert isinstance(module, Decoder)

    def refill() -> None:
        model.drop_gathered()
        fill(module)
        model.drop_gathered()

    fingerprint = None
    if lora.enable_lora and source is None:
        fingerprint = base_fingerprint(MODEL_PATH, local.model.model_path)
    described = describe_model(local.model, architecture, scheme_of(model.whole), fingerprint)
    identity = {**_identity(config, local), "weights": fingerprint}
    return Base(config, local, architecture, rest, runtime, mesh, model, described, identity, refill, position)


def _identity(config: ServerConfig, local: Config) -> Mapping[str, JSON]:
    path = config.model_path or config.config_path
    name = config.model_name or (str(Path(path).resolve()) if path is not None and Path(path).exists() else path)
    start = config.load_checkpoint_path
    is_drawn = config.model_path is None and start is None
    return {
        "name": name,
        "load_checkpoint_path": start,
        "seed": local.train.seed if is_drawn else None,
        "quantization": {name.removeprefix("lora."): value for name, value in base_options(local).items()},
    }
