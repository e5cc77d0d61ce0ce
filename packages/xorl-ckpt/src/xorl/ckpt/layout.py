"""The layout of a checkpoint and of the root that holds all of them: names, manifest, publishing, `latest`, pruning.

    {root}/latest                               text: the name of the checkpoint to resume from, replaced atomically
    {root}/global_step_{N}/metadata.json        the manifest; written last, so a folder that has one is complete
    {root}/global_step_{N}/.metadata, *.distcp  tensors, sharded (or state.pt, gathered)
    {root}/global_step_{N}/training_state/      scalars.json, rng_rank{r}.safetensors
    {root}/.saving_*, .deleting_*               leftovers of a crash; the next save removes them

`latest` is a file and not a symbolic link because some file systems have no links. No function here communicates with
other ranks: only rank 0 writes, and the checkpointer reports its errors to the others.
"""

import errno
import json
import logging
import math
import platform
import re
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias, cast, get_args

import torch
import xxhash

from xorl.ckpt.errors import CheckpointError
from xorl.ckpt.files import FileRecord, check_hashes, check_sizes, sync_file, write_file
from xorl.ckpt.regions import dtype_name

logger = logging.getLogger(__name__)

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
StorageKind: TypeAlias = Literal["dcp", "torch"]

MANIFEST = "metadata.json"
LATEST = "latest"
TRAINING_STATE = "training_state"
SCALARS = f"{TRAINING_STATE}/scalars.json"
GATHERED_STATE = "state.pt"
FORMAT = "xorl-checkpoint"
FORMAT_VERSION = 1

_NAME = re.compile(r"(?:global_)?step_(\d+)")
_SAVING, _DELETING = ".saving_", ".deleting_"
# Errors that choosing another folder resolves; other errors mean a full or broken disk.
_WRONG_FOLDER = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ENAMETOOLONG}


def checkpoint_name(step: int) -> str:
    """The folder name of a step. `step_{N}` is also accepted when reading."""
    return f"global_step_{step}"


def rng_name(rank: int) -> str:
    """The file with the random number generator states of one rank."""
    return f"{TRAINING_STATE}/rng_rank{rank}.safetensors"


@dataclass(frozen=True)
class TensorRecord:
    """The global shape of a saved tensor, and its dtype as torch spells it (`float32`)."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorRecord":
        """The record of a tensor or DTensor."""
        return cls(tuple(tensor.shape), dtype_name(tensor.dtype))

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as a torch.dtype."""
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype), f"{self.dtype} is not a dtype"
        return found

    @property
    def num_bytes(self) -> int:
        """The size of all values in bytes."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


def software_versions() -> dict[str, str]:
    """The software versions that a checkpoint records."""
    try:
        xorl_ckpt = version("xorl-ckpt")
    except PackageNotFoundError:
        xorl_ckpt = "not installed"  # run from its sources
    return {"xorl-ckpt": xorl_ckpt, "torch": torch.__version__, "python": platform.python_version()}


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint except the values of its tensors.

    The caller provides `info` (data position, bins per step, ...). `mesh` lists the device meshes over which the
    tensors were sharded. `previous` is the checkpoint that `latest` named when this one was saved.
    """

    step: int
    storage: StorageKind
    world_size: int
    mesh: Sequence[Mapping[str, JSON]]
    info: Mapping[str, JSON]
    tensors: Mapping[str, TensorRecord]
    files: Mapping[str, FileRecord]
    previous: str | None = None
    versions: Mapping[str, str] = field(default_factory=software_versions)

    def to_json(self) -> str:
        content = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        return json.dumps({**content, "xxh3_128": _content_hash(content)}, indent=1, allow_nan=False)

    def digest(self) -> str:
        return _content_hash(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Raises ValueError, TypeError or KeyError if `to_json` did not write the text."""
        content = json.loads(text)
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise ValueError("it is not the manifest of an xorl checkpoint")
        if content["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"its format_version is {content['format_version']}, but this version of xorl reads {FORMAT_VERSION}"
            )
        written_hash = content.pop("xxh3_128")
        if _content_hash({"format": FORMAT, **content}) != written_hash:
            raise ValueError("its text was changed after it was written (its xxh3_128 differs)")
        if not isinstance(content["step"], int) or content["storage"] not in get_args(StorageKind):
            raise ValueError("its step is not an integer, or its kind of storage is unknown")
        del content["format_version"]
        content["files"] = {_require_inside(name): FileRecord(**record) for name, record in content["files"].items()}
        content["tensors"] = {
            name: TensorRecord(tuple(record["shape"]), record["dtype"]) for name, record in content["tensors"].items()
        }
        return cls(**content)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; raises CheckpointError if the folder is not a complete xorl checkpoint."""
    path = folder / MANIFEST
    try:
        return Manifest.from_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        hint = " (another program wrote this DCP checkpoint)" if (folder / ".metadata").exists() else ""
        raise CheckpointError(f"{folder} is not a complete xorl checkpoint: it has no {MANIFEST}{hint}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error


def verify(folder: Path, names: Collection[str] | None = None) -> Manifest:
    """Read the manifest and check sizes and hashes of its files (or only `names`); raises CheckpointError."""
    manifest = read_manifest(folder)
    chosen = {name: record for name, record in manifest.files.items() if names is None or name in names}
    check_sizes(folder, chosen)
    check_hashes(folder, manifest.files, chosen)
    return manifest


def step_of(folder: Path) -> int | None:
    """The step in a folder's name (`global_step_{N}` or `step_{N}`), or None for any other name."""
    match = _NAME.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def list_checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints of a root, sorted by step."""
    if not root.is_dir():
        return []
    found = [(step, folder.name, folder) for folder in root.iterdir() if (step := step_of(folder)) is not None]
    return [folder for _, _, folder in sorted(found) if is_complete(folder)]


def is_complete(folder: Path) -> bool:
    """Whether the folder has a manifest, which is written last."""
    return (folder / MANIFEST).is_file()


def latest_checkpoint(root: Path) -> Path | None:
    """The checkpoint from which `auto` resumes: the one that `latest` names, else the highest complete step."""
    complete = list_checkpoints(root)
    named, reason = _resolve_latest(root)
    if named is None:
        if complete:
            logger.warning("event=latest_unusable root=%s reason=%s using=%s", root, reason, complete[-1].name)
        return complete[-1] if complete else None
    step = step_of(named) or 0
    for folder in reversed(complete):
        # A save crashed after it renamed the folder and before it replaced `latest`: this checkpoint is the newest.
        if (step_of(folder) or 0) > step and read_manifest(folder).previous == named.name:
            logger.warning("event=latest_behind root=%s using=%s", root, folder.name)
            return folder
    return named


def prepare_root(root: Path, option: str) -> None:
    """Create the root and check that it is writable; `option` is the option that sets it, for error messages."""
    try:
        if not root.is_dir():
            root.mkdir(parents=True, exist_ok=True)
            sync_file(root.parent)
        # The name is unique because several hosts may run this at once.
        Path(tempfile.mkdtemp(prefix=f"{_SAVING}probe_", dir=root)).rmdir()
    except OSError as error:
        if error.errno not in _WRONG_FOLDER:
            raise
        raise CheckpointError(
            f"{option}: cannot write to {root}: {error.strerror}. Choose a writable folder."
        ) from error


def create_folder(root: Path, name: str) -> Path:
    """Remove the leftovers of crashed saves, and create the temporary folder of the checkpoint `name`."""
    remove_leftovers(root)
    folder = root / f"{_SAVING}{name}"
    (folder / TRAINING_STATE).mkdir(parents=True)
    return folder


def publish(folder: Path, root: Path, manifest: Manifest) -> Path:
    """Turn a folder from `create_folder` into the checkpoint of a step, and point `latest` to it.

    Its files must be written and durable. For checkpoints with other names see `publish_named`.
    """
    previous, _ = _resolve_latest(root)
    _complete(folder, replace(manifest, previous=previous.name if previous else None))
    final = root / checkpoint_name(manifest.step)
    if final.exists():
        raise CheckpointError(f"{final} appeared while this checkpoint was written; does another job save there?")
    # All writes that can fail on a full disk happen before the rename that publishes the checkpoint.
    pointer = root / f"{_SAVING}{LATEST}"
    write_file(pointer, f"{final.name}\n".encode())
    folder.rename(final)
    sync_file(root)
    pointer.replace(root / LATEST)
    sync_file(root)
    return final


def publish_named(folder: Path, final: Path, manifest: Manifest, *, replaces: bool) -> None:
    """Turn a folder from `create_folder` into the checkpoint `final`; `latest` does not change.

    With `replaces` it replaces an existing checkpoint, which stays complete until then.
    """
    _complete(folder, manifest)
    if not final.exists():
        folder.rename(final)
        sync_file(final.parent)
        return
    if not replaces:
        raise CheckpointError(f"{final} appeared while this checkpoint was written; does another job save there?")
    replaced = final.with_name(f"{_DELETING}{final.name}")
    final.rename(replaced)
    folder.rename(final)
    sync_file(final.parent)
    shutil.rmtree(replaced)


def prune(root: Path, keep_last: int) -> list[Path]:
    """Remove all but the `keep_last` highest steps, except the one that `latest` names; returns the removed folders."""
    latest = latest_checkpoint(root)
    old = [folder for folder in list_checkpoints(root)[:-keep_last] if folder != latest]
    for folder in old:
        # Renamed first, because a partly deleted checkpoint must not look complete.
        shutil.rmtree(folder.rename(root / f"{_DELETING}{folder.name}"))
    return old


def remove_leftovers(root: Path) -> None:
    """Remove the leftovers of interrupted saves and removals."""
    for leftover in root.iterdir():
        if leftover.name.startswith((_SAVING, _DELETING)):
            logger.warning("event=leftover_removed path=%s", leftover)
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()


def _complete(folder: Path, manifest: Manifest) -> None:
    """Check that rank 0 sees the files of all ranks, and write the manifest."""
    absent = [name for name in manifest.files if not (folder / name).exists()]
    if absent:
        raise CheckpointError(
            f"{folder.parent} is not the same folder on every node: rank 0 does not see {', '.join(absent[:5])}. "
            "Save checkpoints to a file system that all nodes share."
        )
    check_sizes(folder, manifest.files)
    write_file(folder / MANIFEST, manifest.to_json().encode())
    sync_file(folder / TRAINING_STATE)
    sync_file(folder)


def _resolve_latest(root: Path) -> tuple[Path | None, str]:
    """The checkpoint that `latest` names; or None, and the reason, unless it is a complete checkpoint of this root."""
    try:
        name = (root / LATEST).read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnicodeDecodeError):
        return None, f"{LATEST!r} is missing or not a text file"
    folder = root / name
    if step_of(folder) is None or folder.parent != root:
        return None, f"{LATEST!r} names {name!r}, which is not the name of a checkpoint"
    if not is_complete(folder):
        return None, f"{name} has no {MANIFEST}" if folder.exists() else f"{name} is missing"
    return folder, ""


def _require_inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"it names the file {name!r}, which is not inside the checkpoint")
    return name


def _content_hash(content: Mapping[str, object]) -> str:
    # Converted to JSON and back: tuples become lists, as in the content that is read back and compared.
    normal = cast(object, json.loads(json.dumps(content)))
    return xxhash.xxh3_128(json.dumps(normal, sort_keys=True).encode()).hexdigest()
