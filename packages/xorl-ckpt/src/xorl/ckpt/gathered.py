"""Saves all tensors, unsharded, to one file that rank 0 writes (`ckpt_manager: torch`); each rank reads its own part.

Unlike with sharded checkpoints, rank 0 holds the whole state in memory while it saves. The file is a plain `torch.save`
of a dict of tensors, and is read with `weights_only=True`.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch

from xorl.ckpt.errors import CheckpointError
from xorl.ckpt.files import FileRecord, HashedFile
from xorl.ckpt.layout import GATHERED_STATE, TensorRecord
from xorl.ckpt.ranks import all_gather_text, fail_together, this_rank
from xorl.ckpt.regions import gather_whole, local_region, local_tensor


def write_gathered(
    tensors: Mapping[str, torch.Tensor], folder: Path
) -> tuple[dict[str, FileRecord], dict[str, TensorRecord]]:
    """Collective: write the tensors; returns this rank's files (only rank 0 has one) and the records of all tensors."""
    names = sorted(tensors)
    _require_same_names(names)
    whole: dict[str, torch.Tensor] = {}
    for name in names:
        # All ranks join each gather; only rank 0 keeps the result.
        full = gather_whole(tensors[name])
        if this_rank() == 0:
            whole[name] = compact(full)
    files: dict[str, FileRecord] = {}
    with fail_together("write the checkpoint"):
        if this_rank() == 0:
            with HashedFile(folder / GATHERED_STATE) as stream:
                torch.save(whole, stream)  # pyright: ignore[reportArgumentType]
            files[GATHERED_STATE] = stream.record
    records = {name: TensorRecord.of(tensors[name]) for name in names}
    return files, records


def read_gathered(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Copy this rank's part into `tensors` in place; the file is memory-mapped, so only that part is read."""
    path = folder / GATHERED_STATE
    try:
        whole = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error
    if not isinstance(whole, dict) or not all(isinstance(value, torch.Tensor) for value in whole.values()):
        raise CheckpointError(f"{path} cannot be used: it is not a dict of tensors")
    for name, tensor in tensors.items():
        if name not in whole or whole[name].shape != tensor.shape or whole[name].dtype != tensor.dtype:
            raise CheckpointError(f"{path} cannot be used: {name!r} differs from the manifest of {folder.name}")
        local_tensor(tensor).copy_(local_region(tensor).cut(whole[name]))


def _require_same_names(names: list[str]) -> None:
    if len(set(all_gather_text("\n".join(names)))) > 1:
        raise CheckpointError("the ranks hold different tensors; save them as sharded checkpoints (manager 'dcp')")


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, copied if it is a view: torch.save would write the view's entire storage."""
    tensor = tensor.cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
