"""Refuses what cannot run on this machine before any process starts, without torch, which takes seconds to load.

The workers check the rest, such as what a GPU is capable of.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from xorl.config.server import ServerConfig

# The attention backends that run on GPUs alone, with a module that they need.
GPU_ATTENTION = {
    "native": None,
    "flash_attention_2": "flash_attn_2_cuda",
    "flash_attention_3": "flash_attn_3",
    "flash_attention_4": None,
}


def check_machine(config: ServerConfig, num_gpus: int) -> None:
    """Raise ValueError, naming the option, for an attention backend or weights that this machine does not have."""
    backend = config.attn_implementation
    if backend in GPU_ATTENTION:
        others = "set attn_implementation to auto, which picks one that can"
        if not num_gpus:
            raise ValueError(f"attn_implementation: {backend} needs a GPU, and this machine has none: {others}")
        module = GPU_ATTENTION[backend]
        if module is not None and find_spec(module) is None:
            raise ValueError(f"attn_implementation: {backend} cannot run, since {module} is not installed: {others}")
    start = config.load_checkpoint_path
    if start and not Path(start).expanduser().is_dir():
        raise ValueError(f"load_checkpoint_path: {start} is not a folder; set it to a checkpoint, or to a run's folder")
    paths = {
        "model_path": config.model_path,
        "config_path": config.config_path,
        "tokenizer_path": config.tokenizer_path,
    }
    for option, path in paths.items():
        if path is not None and _is_path(path) and not Path(path).expanduser().exists():
            raise ValueError(
                f"{option}: there is no folder {path!r}; set it to one that exists, or to an id on the Hub"
            )
    if config.model_path is None or start:
        return
    folder = Path(config.model_path).expanduser()
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"model_path: {config.model_path} has no weights (*.safetensors); choose a folder with them, or start from "
            "random weights with config_path instead"
        )


def _is_path(text: str) -> bool:
    """Whether a text cannot be the id of a repository on the Hub, as `xorl.ckpt.hub` decides it."""
    return text.startswith(("/", "./", "../", "~")) or text.count("/") > 1
