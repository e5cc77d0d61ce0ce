"""Verified distributed checkpoints, and Hugging Face weights in and out of sharded parameters."""

from importlib.metadata import version

from xorl.ckpt.background import BackgroundWriter
from xorl.ckpt.checkpointer import Checkpointer
from xorl.ckpt.errors import CheckpointError, CheckpointFailure
from xorl.ckpt.export import export_hf
from xorl.ckpt.hub import resolve_folder
from xorl.ckpt.layout import read_manifest
from xorl.ckpt.load import load_weights
from xorl.ckpt.optimizer import OptimizerState
from xorl.ckpt.reader import SafetensorsSource, WeightRecipe, WeightSource
from xorl.ckpt.regions import Piece
from xorl.ckpt.retention import Retention
from xorl.ckpt.state import Stateful

__all__ = [
    "BackgroundWriter",
    "CheckpointError",
    "CheckpointFailure",
    "Checkpointer",
    "OptimizerState",
    "Piece",
    "Retention",
    "SafetensorsSource",
    "Stateful",
    "WeightRecipe",
    "WeightSource",
    "__version__",
    "export_hf",
    "load_weights",
    "read_manifest",
    "resolve_folder",
]

__version__ = version("xorl-ckpt")
