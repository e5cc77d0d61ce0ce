"""Reads DCP's `.metadata`, a pickle, without executing anything in it.

Every class that the pickle names is replaced by a record class made for this one reading; a name that DCP does not
write is refused. So a crafted file can neither call nor change anything in Python or torch. The real metadata is then
built from those records, with each value checked. BytesStorageMetadata is missing on purpose: DCP reads the items that
it describes with an unrestricted unpickler.
"""

import math
import pickle
from collections.abc import Callable, Collection
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch.distributed.checkpoint import filesystem as dcp_files
from torch.distributed.checkpoint import metadata as dcp

from xorl.ckpt.errors import CheckpointError

METADATA = ".metadata"

_RECORDS = frozenset(
    (kind.__module__, kind.__name__)
    for kind in (
        dcp.ChunkStorageMetadata,
        dcp.Metadata,
        dcp.MetadataIndex,
        dcp.StorageMeta,
        dcp.TensorProperties,
        dcp.TensorStorageMetadata,
        dcp_files._StorageInfo,
    )
)
_VALUES = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        (dcp.__name__, dcp._MEM_FORMAT_ENCODING.__name__),
    }
)


def read_metadata(folder: Path, files: Collection[str]) -> dcp.Metadata:
    """The metadata of a folder, which may only refer to `files`. Raises CheckpointError for anything else."""
    path = folder / METADATA
    with path.open("rb") as stream:
        try:
            return _metadata(_RecordUnpickler(stream).load(), files)
        except OSError:
            raise
        except Exception as error:  # a crafted pickle makes the unpickler raise anything at all
            raise CheckpointError(f"{path} cannot be used: {type(error).__name__}: {error}") from error


class _Record:
    state: object = None


class _RecordUnpickler(pickle.Unpickler):
    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream)
        self._stand_ins: dict[tuple[str, str], object] = {}

    def find_class(self, module_name: str, global_name: str, /) -> object:
        name = (module_name, global_name)
        if name not in self._stand_ins:
            self._stand_ins[name] = _stand_in(name)
        return self._stand_ins[name]


def _stand_in(name: tuple[str, str]) -> object:
    """Created for each reading, since a pickle can set attributes on the classes it gets."""
    if name in _RECORDS:

        def keep(record: _Record, state: object) -> None:
            record.state = state

        return type(name[1], (_Record,), {"__setstate__": keep})
    if name in _VALUES:
        value: Callable[[object], object] = lambda given: given  # noqa: E731
        return value
    if name[0] == "torch" and isinstance(getattr(torch, name[1], None), torch.dtype):
        return name[1]
    raise pickle.UnpicklingError(f"it asks for {name[0]}.{name[1]}, which no checkpoint of ours holds")


def _metadata(record: object, files: Collection[str]) -> dcp.Metadata:
    content = _fields(record, "Metadata")
    tensors: dict[str, dcp.STORAGE_TYPES] = {
        _text(name): _tensor(_text(name), tensor) for name, tensor in _dict(content["state_dict_metadata"]).items()
    }
    places: dict[dcp.MetadataIndex, dcp_files._StorageInfo] = {}
    for key, value in _dict(content["storage_data"]).items():
        index, place = _fields(key, "MetadataIndex"), _fields(value, "_StorageInfo")
        name, file = _text(index["fqn"]), _text(place["relative_path"])
        if file not in files or place.get("transform_descriptors"):
            raise ValueError(f"{name!r} lies in {file!r}, which is not a file of the checkpoint")
        places[dcp.MetadataIndex(name, _box(index.get("offset")), _count(index.get("index", 0)))] = (
            dcp_files._StorageInfo(file, _count(place["offset"]), _count(place["length"]))
        )
    return dcp.Metadata(tensors, storage_data=places, storage_meta=dcp.StorageMeta())


def _tensor(name: str, record: object) -> dcp.TensorStorageMetadata:
    content = _fields(record, "TensorStorageMetadata")
    properties = getattr(content["properties"], "state", None)
    dtype = getattr(torch, _text(properties[0])) if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, torch.dtype) or not isinstance(content["chunks"], list):
        raise ValueError(f"{name!r} is described wrongly")
    size = _box(content["size"])
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in content["chunks"]]
    boxes = [dcp.ChunkStorageMetadata(_box(chunk["offsets"]), _box(chunk["sizes"])) for chunk in chunks]
    covered = sum(math.prod(box.sizes) for box in boxes)
    if covered != math.prod(size):
        raise ValueError(f"the shards of {name!r} hold {covered} of {math.prod(size)} values")
    return dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype), size, boxes)


def _fields(record: object, kind: str) -> dict[str, object]:
    if not isinstance(record, _Record) or type(record).__name__ != kind:
        raise ValueError(f"{kind} is wanted, found {type(record).__name__}")
    return cast(dict[str, object], _dict(record.state))


def _dict(value: object) -> dict[object, object]:
    if not isinstance(value, dict):
        raise ValueError(f"a dict is wanted, found {type(value).__name__}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a string is wanted, found {type(value).__name__}")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"a count is wanted, found {value!r}")
    return value


def _box(value: object) -> torch.Size:
    if not isinstance(value, tuple):
        raise ValueError(f"a tuple of sizes is wanted, found {type(value).__name__}")
    return torch.Size([_count(size) for size in value])
