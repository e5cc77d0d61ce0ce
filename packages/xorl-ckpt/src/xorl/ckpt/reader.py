"""WeightSource: named tensors, read by ranges of rows. WeightRecipe: how a model's parameters are built from them.

SafetensorsSource reads a folder in Hugging Face's layout: `model.safetensors`, or several files and their index.
"""

import json
import math
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from xorl.ckpt.errors import CheckpointError, require

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


# A fingerprint covers this many samples of a tensor's bytes, of this size each: the first and the last ones, and those
# in the middle. A sample is a page, the least that a file system reads.
_NUM_SAMPLES, _SAMPLE_BYTES = 3, 4096
# A disk answers several reads at once.
_NUM_READERS = 16

# Of values that need no scales.
WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class WeightSource(Protocol):
    """Named tensors that can be read in part, by several threads at once.

    Methods raise CheckpointErrors that name the file and the tensor.
    """

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        """Rows [start, stop) along dim 0 (all of them by default), on the CPU."""
        ...


class WeightRecipe(Protocol):
    """How one parameter of a model is built from the tensors of a source, and split into them again.

    `shape` is the parameter's global shape, with at least one dim. `read` returns the rows [start, stop) of the
    parameter. `split` takes the full parameter and returns the source's tensors by name; it must also accept a meta
    tensor, which yields the expected shapes of the source's tensors. `join_dim` is None if the parameter contains each
    of its sources completely. Otherwise several parameters share one source: each holds a part of it, and the source is
    the concatenation of the parts along this dim, in the order of the recipes. With `keeps_dtype`, exports write the
    source's tensors in the dtype of the parameter, whatever that of the others is.
    """

    @property
    def sources(self) -> tuple[str, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def join_dim(self) -> int | None: ...

    @property
    def keeps_dtype(self) -> bool: ...

    def read(self, source: WeightSource, start: int, stop: int) -> torch.Tensor: ...

    def split(self, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]: ...


@dataclass(frozen=True)
class SameTensor:
    """The recipe of a parameter that a file holds under its own name, in its own shape."""

    name: str
    shape: tuple[int, ...]
    join_dim: None = None
    keeps_dtype: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, source: WeightSource, start: int, stop: int) -> torch.Tensor:
        return source.read(self.name, start, stop)

    def split(self, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {self.name: tensor}


@dataclass(frozen=True)
class SameScalar:
    """The recipe of a 0-dim tensor that a file holds under its own name; in memory it is a row of one value."""

    name: str
    shape: tuple[int, ...] = (1,)
    join_dim: None = None
    keeps_dtype: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, source: WeightSource, start: int, stop: int) -> torch.Tensor:
        return source.read(self.name).view(1)[start:stop]

    def split(self, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {self.name: tensor.view(())}


def source_shapes(recipes: Mapping[str, WeightRecipe]) -> dict[str, tuple[int, ...]]:
    """The shapes of the source tensors that these recipes expect; they must include all parts of shared sources."""
    shapes: dict[str, tuple[int, ...]] = {}
    for recipe in recipes.values():
        for name, part in recipe.split(torch.empty(recipe.shape, device="meta")).items():
            shape = list(part.shape)
            if name in shapes and recipe.join_dim is not None:
                shape[recipe.join_dim] += shapes[name][recipe.join_dim]
            shapes[name] = tuple(shape)
    return shapes


def require_recipes(recipes: object) -> None:
    """Raises CheckpointError unless `recipes` is a mapping of names to recipes."""
    require("recipes", recipes, isinstance(recipes, Mapping), "a mapping of names to recipes, such as SameTensor(...)")
    assert isinstance(recipes, Mapping)
    for name, recipe in recipes.items():
        require(f"recipes: {name}", recipe, hasattr(recipe, "split"), "a recipe, such as SameTensor(name, shape)")


def require_shapes(shapes: Mapping[str, Sequence[int]], recipes: Mapping[str, WeightRecipe]) -> None:
    """Raises CheckpointError for a parameter of another shape than its recipe's."""
    for name, shape in shapes.items():
        if tuple(shape) != tuple(recipes[name].shape):
            wanted = list(recipes[name].shape)
            raise CheckpointError(f"recipes: the recipe of {name} is for {wanted}, but its shape is {list(shape)}")


class SafetensorsSource:
    """The safetensors files of one folder. Files are opened on first use; `close` (or `with`) closes them.

    Rows are read, not memory-mapped, so several threads reach the speed of the disk, and the pages of the files do not
    count as memory of this process. `single_file` is the name of the file to read if there is no index.
    """

    def __init__(self, folder: Path | str, *, single_file: str = SINGLE_FILE) -> None:
        """Raises CheckpointError if the folder has no safetensors files or an invalid index."""
        self._folder = Path(folder).expanduser()
        self._single_file = single_file
        self._opened: dict[str, _OpenFile] = {}
        self._lock = threading.Lock()
        self._files = self._list_tensors()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for opened in self._opened.values():
            os.close(opened.descriptor)
        self._opened.clear()

    def names(self) -> Collection[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name)[1].shape

    def dtype(self, name: str) -> torch.dtype:
        stored = self._tensor(name)[1].dtype
        if stored not in STORED_DTYPES:
            raise CheckpointError(f"{self._location(name)} has the dtype {stored}, which is not supported")
        return STORED_DTYPES[stored]

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        dtype = self.dtype(name)
        descriptor, stored = self._tensor(name)
        if not stored.shape and (start, stop) != (None, None):
            raise CheckpointError(f"{self._location(name)} cannot be read: it has no rows")
        first, last, _ = slice(start, stop).indices(stored.shape[0]) if stored.shape else (0, 1, 1)
        row_bytes = math.prod(stored.shape[1:]) * dtype.itemsize
        rows = torch.empty(max(last - first, 0) * row_bytes, dtype=torch.uint8)
        try:
            _read_into(rows, descriptor, stored.offset + first * row_bytes)
        except OSError as error:
            raise CheckpointError(f"{self._location(name)} cannot be read: {error}") from error
        return rows.view(dtype).view(max(last - first, 0), *stored.shape[1:]) if stored.shape else rows.view(dtype)[0]

    @property
    def metadata(self) -> Mapping[str, str]:
        """The texts that the header of the file records beside its tensors; of one of them if there are several."""
        return self._file(next(iter(self._files.values()))).metadata if self._files else {}

    def fingerprint(self) -> str:
        """Hash the name, dtype and shape of every tensor, and three samples of its values.

        Does not depend on the folder, or on how tensors are divided into files. Tensors of up to 12 KiB are hashed
        completely; of larger ones, a change may be missed if it is confined to values between the samples.
        """
        with ThreadPoolExecutor(_NUM_READERS) as readers:
            parts = readers.map(self._tensor_hash, sorted(self._files))
            return xxhash.xxh3_128_hexdigest("".join(parts).encode())

    def _tensor_hash(self, name: str) -> str:
        descriptor, stored = self._tensor(name)
        hashed = xxhash.xxh3_128(json.dumps([name, stored.dtype, stored.shape]).encode())
        last = max(stored.num_bytes - _SAMPLE_BYTES, 0)
        starts = [last * index // (_NUM_SAMPLES - 1) for index in range(_NUM_SAMPLES)]
        for start in starts:
            sample = torch.empty(min(_SAMPLE_BYTES, stored.num_bytes), dtype=torch.uint8)
            try:
                _read_into(sample, descriptor, stored.offset + start)
            except OSError as error:
                raise CheckpointError(f"{self._location(name)} cannot be read: {error}") from error
            hashed.update(sample.numpy().data)
        return hashed.hexdigest()

    def _list_tensors(self) -> Mapping[str, str]:
        """The file of each tensor."""
        folder = self._folder
        if (folder / self._single_file).is_file():
            return dict.fromkeys(self._file(self._single_file).tensors, self._single_file)
        if self._single_file == SINGLE_FILE and (folder / INDEX_FILE).is_file():
            return _read_index(folder)
        found = sorted(path.name for path in folder.iterdir())[:8] if folder.is_dir() else []
        hint = f"found {', '.join(found) or 'nothing'}" if folder.is_dir() else "no such folder"
        if folder.is_file():
            hint = f"it is a file; pass its folder, with single_file={folder.name!r}"
        if any(name.endswith((".bin", ".pt", ".pth")) for name in found):
            hint += "; pickled weights are not supported, convert them to safetensors"
        wanted = f"{SINGLE_FILE} and no {INDEX_FILE}" if self._single_file == SINGLE_FILE else self._single_file
        raise CheckpointError(f"{folder} contains no {wanted} ({hint})")

    def _location(self, name: str) -> str:
        return f"{self._folder / self._files[name]}: tensor {name!r}"

    def _tensor(self, name: str) -> tuple[int, "_StoredTensor"]:
        """The descriptor of its file, and where it is in it."""
        if name not in self._files:
            raise CheckpointError(f"{self._folder} contains no tensor {name!r}")
        opened = self._file(self._files[name])
        if name not in opened.tensors:
            raise CheckpointError(f"{self._location(name)} cannot be read, though the index lists it")
        return opened.descriptor, opened.tensors[name]

    def _file(self, file: str) -> "_OpenFile":
        with self._lock:
            if file not in self._opened:
                path = self._folder / file
                try:
                    self._opened[file] = _open(path)
                except FileNotFoundError:
                    raise CheckpointError(f"{path} is missing, although {INDEX_FILE} lists it") from None
                except (SafetensorError, OSError) as error:
                    raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
            return self._opened[file]


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor in a file: its dtype as safetensors names it, and where its bytes are."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class _OpenFile:
    descriptor: int
    tensors: Mapping[str, _StoredTensor]
    metadata: Mapping[str, str]


def _open(path: Path) -> _OpenFile:
    with safe_open(path, framework="pt", device="cpu"):
        pass  # checks the header and the size of the file
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    header = json.loads(os.pread(descriptor, length, 8))
    metadata = header.pop("__metadata__", {})
    tensors = {
        name: _StoredTensor(
            entry["dtype"],
            tuple(entry["shape"]),
            offset=8 + length + entry["data_offsets"][0],
            num_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }
    return _OpenFile(descriptor, tensors, metadata)


def _read_into(buffer: torch.Tensor, descriptor: int, offset: int) -> None:
    """Fill a buffer of bytes from a file. Raises OSError if the file ends before."""
    view = buffer.numpy().data
    while view:
        num_read = os.preadv(descriptor, [view], offset)
        if not num_read:
            raise OSError(f"the file ends {len(view)} bytes too early")
        view, offset = view[num_read:], offset + num_read


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX_FILE
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise ValueError("weight_map is not a mapping from tensor names to file names")
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be used: {type(error).__name__}: {error}") from error
    for file in sorted(set(files.values())):
        if Path(file).name != file:
            raise CheckpointError(f"{path} lists {file!r}, which is not a file in the same folder")
        if not (folder / file).is_file():
            num_tensors = sum(other == file for other in files.values())
            raise CheckpointError(f"{folder / file} is missing; {INDEX_FILE} lists {num_tensors} tensors in it")
    return files
