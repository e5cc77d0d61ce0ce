"""What tests do with an engine that layouts.py makes: the passes of a step, and an export."""

from pathlib import Path

import torch

from xorl.config import Config
from xorl.core.loss import cross_entropy
from xorl.train.engine import Engine, StepLosses
from xorl.train.export.folder import ModelExport
from xorl.train.export.rest import Rest
from xorl.train.model_source import read_architecture
from xorl.train.verify import batches_of


def export_to(folder: Path, engine: Engine, config: Config) -> None:
    """Write the model in bf16 as others read it. Collective."""
    architecture = read_architecture(config.model)
    recipes, rest = architecture.recipes(merge_qkv=config.model.merge_qkv), Rest.of(architecture)
    ModelExport(engine.model, recipes, architecture, torch.bfloat16, None, rest).write(folder)


def forward_backward_of(engine: Engine, config: Config, step: int = 0, num_bins: int = 4) -> StepLosses:
    """The passes of a step. Collective."""
    vocab_size = engine.model.module.config.vocab_size
    return engine.forward_backward(batches_of(step, num_bins, vocab_size, config, engine.model.mesh), cross_entropy)
