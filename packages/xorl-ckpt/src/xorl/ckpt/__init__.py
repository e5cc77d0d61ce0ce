"""Verified distributed checkpoints, and Hugging Face weights in and out of sharded parameters."""

from xorl.ckpt.checkpointer import Checkpointer, LoadedCheckpoint, Stateful
from xorl.ckpt.errors import CheckpointError, CheckpointFailure
from xorl.ckpt.export import (
    CARD_FILE,
    TEMPLATE_FILE,
    export_hf,
    json_bytes,
    parameter_groups,
    source_groups,
    write_model,
)
from xorl.ckpt.files import FileRecord, write_file
from xorl.ckpt.hub import resolve_folder
from xorl.ckpt.layout import (
    JSON,
    Manifest,
    TensorRecord,
    is_complete,
    latest_checkpoint,
    read_manifest,
    verify,
)
from xorl.ckpt.load import LoadMode, LoadReport, RowTarget, load_weights
from xorl.ckpt.publish import published
from xorl.ckpt.ranks import agreed, this_rank
from xorl.ckpt.reader import SafetensorsSource, WeightRecipe, WeightSource, source_shapes
from xorl.ckpt.saved_tensors import SavedParameters
from xorl.ckpt.tensor_file import TensorGroup, write_tensor_file

__all__ = [
    "CARD_FILE",
    "JSON",
    "TEMPLATE_FILE",
    "CheckpointError",
    "CheckpointFailure",
    "Checkpointer",
    "FileRecord",
    "LoadMode",
    "LoadReport",
    "LoadedCheckpoint",
    "Manifest",
    "RowTarget",
    "SafetensorsSource",
    "SavedParameters",
    "Stateful",
    "TensorGroup",
    "TensorRecord",
    "WeightRecipe",
    "WeightSource",
    "agreed",
    "export_hf",
    "is_complete",
    "json_bytes",
    "latest_checkpoint",
    "load_weights",
    "parameter_groups",
    "published",
    "read_manifest",
    "resolve_folder",
    "source_groups",
    "source_shapes",
    "this_rank",
    "verify",
    "write_file",
    "write_model",
    "write_tensor_file",
]
