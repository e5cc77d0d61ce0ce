"""Reads and writes the tensors of a checkpoint, in one of two formats.

    dcp     torch's distributed checkpoint (DCP) files: each rank writes and reads its own shards. DCP does the planning
            and the resharding.
    torch   one file with all tensors, unsharded, as `torch.save` writes a dict. Rank 0 writes it and holds the whole
            state in memory meanwhile; each rank reads its own part.

Files are hashed as they are written. Nothing is unpickled without restriction: tensors are read with
`weights_only=True`, and `metadata.py` reads DCP's `.metadata`.
"""

import io
import json
import math
import os
import pickle
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.utils import find_state_dict_object

from xorl.ckpt.errors import CheckpointError, CheckpointFailure
from xorl.ckpt.files import FileRecord, HashedFile
from xorl.ckpt.layout import GATHERED_STATE, TensorRecord
from xorl.ckpt.ranks import (
    all_gather_text,
    collective_device,
    current_group,
    describe,
    fail_together,
    is_distributed,
    require_same,
    this_rank,
)
from xorl.ckpt.regions import Piece, Region, Stored, dtype_name, local_boxes, local_tensor


def write_shards(tensors: Mapping[str, Stored], folder: Path) -> tuple[dict[str, FileRecord], dict[str, TensorRecord]]:
    """Collective: write DCP files; returns this rank's files and the records of all tensors.

    Raises on every rank or on none.
    """
    writer = _HashingWriter(folder, on_gpu=any(local_tensor(tensor).is_cuda for tensor in tensors.values()))
    planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _dcp_failures("write the checkpoint", CheckpointFailure), _quiet_single_process():
        saved = dcp.save(
            dict(tensors),
            storage_writer=writer,
            planner=planner,
            process_group=current_group(),
            no_dist=not is_distributed(),
        )
    return writer.files.records, _tensor_records(saved)


def read_shards(tensors: Mapping[str, Stored], folder: Path, metadata: Metadata, *, collective: bool = True) -> None:
    """Copy DCP files into `tensors` in place. `metadata` is the result of `read_metadata` for the folder.

    Without `collective`, only this rank reads, into plain tensors.
    """
    reader = _CheckedReader(folder, metadata)
    planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _dcp_failures(f"read {folder}", CheckpointError), _quiet_single_process():
        dcp.load(dict(tensors), storage_reader=reader, planner=planner, no_dist=not (collective and is_distributed()))


def write_gathered(
    tensors: Mapping[str, Stored], folder: Path
) -> tuple[dict[str, FileRecord], dict[str, TensorRecord]]:
    """Collective: rank 0 writes one file; returns this rank's files and the records of all tensors."""
    names = sorted(tensors)
    require_same("\n".join(names), "the ranks hold different tensors; save them as sharded checkpoints (manager 'dcp')")
    whole = _gathered(tensors, names)
    files: dict[str, FileRecord] = {}
    with fail_together("write the checkpoint"):
        if this_rank() == 0:
            with HashedFile(folder / GATHERED_STATE) as stream:
                torch.save(whole, stream)  # pyright: ignore[reportArgumentType]
            files[GATHERED_STATE] = stream.record
    records = {name: TensorRecord.of(tensors[name]) for name in names}
    return files, records


def _gathered(tensors: Mapping[str, Stored], names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Collective: the whole tensors in host memory on rank 0; nothing on other ranks.

    Parts are sent over the current group, not over the groups of their meshes, so that this works in the background.
    """
    local = [dict(local_boxes(tensors[name])) for name in names]
    shown = [[[box.offsets, box.sizes] for box in boxes] for boxes in local]
    by_rank = [json.loads(text) for text in all_gather_text(json.dumps(shown))]
    whole: dict[str, torch.Tensor] = {}
    for index, name in enumerate(names):
        owners: dict[Region, int] = {}  # replicas are sent once, and in the same order on every rank
        for rank, of_rank in enumerate(by_rank):
            for box in of_rank[index]:
                owners.setdefault(Region(*map(tuple, box)), rank)
        dtype, shape = tensors[name].dtype, tuple(tensors[name].shape)
        parts = {
            box: _to_rank_0(local[index].get(box), dtype, box, owner)
            for box, owner in owners.items()
            if math.prod(box.sizes) > 0
        }
        if this_rank() == 0:
            full = parts.get(Region((0,) * len(shape), shape))
            whole[name] = torch.empty(shape, dtype=dtype) if full is None else full
            if full is None:
                for box, part in parts.items():
                    box.cut(whole[name]).copy_(part)
    return whole


def _to_rank_0(part: torch.Tensor | None, dtype: torch.dtype, box: Region, owner: int) -> torch.Tensor:
    """The values of `box`, which `owner` passes as `part`, in host memory on rank 0; undefined on other ranks."""
    if this_rank() == owner:
        assert part is not None
        part = compact(part).contiguous()
        if owner != 0:
            data = part.reshape(-1).view(torch.uint8)
            dist.send(data.to(collective_device()), dst=0, group=current_group())
        return part
    if this_rank() != 0:
        return torch.empty(0)
    data = torch.empty(math.prod(box.sizes) * dtype.itemsize, dtype=torch.uint8, device=collective_device())
    dist.recv(data, src=owner, group=current_group())
    return data.cpu().view(dtype).view(box.sizes)


def read_gathered(tensors: Mapping[str, Stored], folder: Path) -> None:
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
        for box, part in local_boxes(tensor):
            part.copy_(box.cut(whole[name]))


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, copied if it is a view: torch.save would write the view's entire storage."""
    tensor = tensor.cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _tensor_records(metadata: Metadata) -> dict[str, TensorRecord]:
    records: dict[str, TensorRecord] = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), "the state holds only tensors"
        records[name] = TensorRecord(tuple(tensor.size), dtype_name(tensor.properties.dtype))
    return records


class _HashedFiles(FileSystem):
    """DCP's file system; files are hashed, must not exist before, and are durable once closed."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "wb", "this file system only writes"
        with HashedFile(Path(path)) as stream:
            yield cast(io.IOBase, stream)
        self.records[Path(path).name] = stream.record

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _HashingWriter(FileSystemWriter):
    def __init__(self, folder: Path, *, on_gpu: bool) -> None:
        # sync_files is not needed: closing a HashedFile syncs it.
        super().__init__(folder, sync_files=False, overwrite=False)
        if not on_gpu:
            # To copy ahead from a GPU, DCP waits for all that is queued on the current stream, even if the tensors are
            # in host memory: a save in the background would wait for one training step after another.
            self.per_thread_copy_ahead = 0
        self.files = _HashedFiles()
        self.fs = self.files

    def storage_meta(self) -> StorageMeta:
        # Omits the folder's path, which is temporary.
        return StorageMeta(save_id=self.save_id)


class _CheckedReader(FileSystemReader):
    """Uses metadata that was already checked. DCP reads the tensors in the shards with `weights_only=True`."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self._metadata


def _find(state: dict[str, Any], index: MetadataIndex) -> torch.Tensor:
    held = state[index.fqn]
    if isinstance(held, Piece):
        assert index.offset is not None, "a piece is saved and loaded by boxes"
        return held.at(index.offset)
    return find_state_dict_object(state, index)


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return _find(self.state_dict, index)


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # DCP's method would give memory to tensors on the meta device, of which there are none, and lose pieces.
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return _find(self.state_dict, index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # DCP's method unpickles without restriction.
        raise pickle.UnpicklingError(f"{read_item.dest_index.fqn!r} is not a tensor")


@contextmanager
def _dcp_failures(action: str, kind: type[CheckpointError] | type[CheckpointFailure]) -> Iterator[None]:
    """Translate CheckpointException, a BaseException that DCP raises on every rank with the errors of all ranks."""
    try:
        yield
    except CheckpointException as failure:
        errors = [(rank, error) for rank, (error, _) in failure.failures.items()]
        interruption = next((error for _, error in errors if not isinstance(error, Exception)), None)
        if interruption is not None:
            raise interruption from failure
        if any(isinstance(error, OSError) for _, error in errors):
            kind = CheckpointFailure
        lines = "\n  ".join(f"rank {rank}: {describe(error)}" for rank, error in errors[:4])
        raise kind(f"could not {action}\n  {lines}") from failure


@contextmanager
def _quiet_single_process() -> Iterator[None]:
    """Hide DCP's warning that there is no process group."""
    if is_distributed():
        yield  # filters are shared by all threads: a save in the background must not change them
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
