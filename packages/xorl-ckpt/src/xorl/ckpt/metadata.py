"""Reads DCP's `.metadata`, a pickle, without executing code from it.

Every class that the pickle names is replaced by a new record class, created for each read; names that DCP does not
write are rejected. So a crafted file can neither call nor modify anything in Python or torch. The real metadata is then
built from the records, and each value is checked. BytesStorageMetadata is left out on purpose: DCP would read the items
it describes with an unrestricted unpickler.
"""

import math
import pickle
from collections.abc import Callable, Collection
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch.distributed.checkpoint import metadata as dcp

from xorl.ckpt.layout import damaged
from xorl.ckpt.torch_private import MEMORY_FORMAT, StorageInfo

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
        StorageInfo,
    )
)
_VALUES = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        (dcp.__name__, MEMORY_FORMAT.__name__),
    }
)


def read_metadata(folder: Path, files: Collection[str]) -> dcp.Metadata:
    """The metadata of a folder.

    Raises CheckpointError if it is missing or invalid, or refers to files other than `files`.
    """
    try:
        with (folder / METADATA).open("rb") as stream:
            return _metadata(_RecordUnpickler(stream).load(), files)
    except FileNotFoundError:
        raise damaged(folder, [f"{METADATA} is missing"]) from None
    except OSError:
        raise
    except Exception as error:  # a crafted pickle can make the unpickler raise any type
        raise damaged(folder, [f"{METADATA} cannot be used: {type(error).__name__}: {error}"]) from error


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
    """A replacement for a class or function; created for each read, since a pickle can set attributes on it."""
    if name in _RECORDS:

        def keep(record: _Record, state: object) -> None:
            record.state = state

        return type(name[1], (_Record,), {"__setstate__": keep})
    if name in _VALUES:
        value: Callable[[object], object] = lambda given: given  # noqa: E731
        return value
    if name[0] == "torch" and isinstance(getattr(torch, name[1], None), torch.dtype):
        return name[1]
    raise pickle.UnpicklingError(f"it names {name[0]}.{name[1]}, which xorl checkpoints do not use")


def _metadata(record: object, files: Collection[str]) -> dcp.Metadata:
    content = _fields(record, "Metadata")
    tensors: dict[str, dcp.STORAGE_TYPES] = {
        _text(name): _tensor(_text(name), tensor) for name, tensor in _dict(content["state_dict_metadata"]).items()
    }
    locations: dict[dcp.MetadataIndex, StorageInfo] = {}
    for key, value in _dict(content["storage_data"]).items():
        index, location = _fields(key, "MetadataIndex"), _fields(value, "_StorageInfo")
        name, file = _text(index["fqn"]), _text(location["relative_path"])
        if file not in files:
            raise ValueError(f"{name!r} is stored in {file!r}, which is not a file of the checkpoint")
        if location.get("transform_descriptors"):
            raise ValueError(f"{name!r} is stored compressed or transformed, which is not supported")
        locations[dcp.MetadataIndex(name, _sizes(index.get("offset")), _count(index.get("index", 0)))] = StorageInfo(
            file, _count(location["offset"]), _count(location["length"])
        )
    return dcp.Metadata(tensors, storage_data=locations, storage_meta=dcp.StorageMeta())


def _tensor(name: str, record: object) -> dcp.TensorStorageMetadata:
    content = _fields(record, "TensorStorageMetadata")
    properties = getattr(content["properties"], "state", None)
    dtype = getattr(torch, _text(properties[0])) if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, torch.dtype) or not isinstance(content["chunks"], list):
        raise ValueError(f"the description of {name!r} is invalid")
    size = _sizes(content["size"])
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in content["chunks"]]
    boxes = [dcp.ChunkStorageMetadata(_sizes(chunk["offsets"]), _sizes(chunk["sizes"])) for chunk in chunks]
    covered = sum(math.prod(box.sizes) for box in boxes)
    if covered != math.prod(size):
        raise ValueError(f"the shards of {name!r} hold {covered} of {math.prod(size)} values")
    return dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype), size, boxes)


def _fields(record: object, kind: str) -> dict[str, object]:
    if not isinstance(record, _Record) or type(record).__name__ != kind:
        raise ValueError(f"expected {kind}, found {type(record).__name__}")
    return cast(dict[str, object], _dict(record.state))


def _dict(value: object) -> dict[object, object]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a dict, found {type(value).__name__}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a string, found {type(value).__name__}")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a non-negative integer, found {value!r}")
    return value


def _sizes(value: object) -> torch.Size:
    if not isinstance(value, tuple):
        raise ValueError(f"expected a tuple of sizes, found {type(value).__name__}")
    return torch.Size([_count(size) for size in value])
