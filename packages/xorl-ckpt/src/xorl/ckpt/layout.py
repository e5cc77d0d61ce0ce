"""The layout of a checkpoint and of the root that holds all of them: names, manifest, and what is there.

    {root}/latest                               text: the name of the checkpoint to resume from, replaced atomically
    {root}/global_step_{N}/metadata.json        the manifest; written last, so a folder that has one is complete
    {root}/global_step_{N}/.metadata, *.distcp  tensors, sharded (or state.pt, gathered)
    {root}/global_step_{N}/training_state/      scalars.json, rng_rank{r}.safetensors
    {root}/.saving_{name}_{id}                  a save that is being written; its owner holds a lock on `...owner`
    {root}/.deleting_{name}_{id}                a checkpoint that is being removed
    {root}/set_aside_{n}/                       later checkpoints, moved when a run went back to an earlier one

`latest` is a file and not a symbolic link because some file systems have no links. Nothing here writes; `publish.py`
does.
"""

import json
import logging
import math
import platform
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias, cast, get_args

import torch
import xxhash

from xorl.ckpt.errors import CheckpointError
from xorl.ckpt.files import FileRecord, hash_problems, size_problems
from xorl.ckpt.regions import Stored, dtype_name

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
# Prefixes of folders that are not checkpoints.
SAVING, DELETING, SET_ASIDE = ".saving_", ".deleting_", "set_aside_"


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
    def of(cls, tensor: Stored) -> "TensorRecord":
        """The record of a tensor, in whatever form it is held."""
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


def read_manifest(folder: Path | str) -> Manifest:
    """The manifest of a checkpoint; raises CheckpointError if the folder is not a complete xorl checkpoint."""
    folder = Path(folder)
    path = folder / MANIFEST
    try:
        return Manifest.from_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        is_dcp = (folder / ".metadata").exists()
        hint = "; it holds DCP files, of another program or of a checkpoint that is incomplete" if is_dcp else ""
        raise CheckpointError(f"{folder} is not a complete xorl checkpoint: it has no {MANIFEST}{hint}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}\n{_advice(folder)}") from error


def verify(folder: Path, names: Collection[str] | None = None) -> Manifest:
    """Read the manifest and check sizes and hashes of its files (or only `names`); raises CheckpointError."""
    manifest = read_manifest(folder)
    chosen = {name: record for name, record in manifest.files.items() if names is None or name in names}
    require_intact(folder, chosen, chosen)
    return manifest


def require_intact(folder: Path, files: Mapping[str, FileRecord], hashed: Iterable[str]) -> None:
    """Check the sizes of `files` and the hashes of those in `hashed`; raises CheckpointError naming damaged ones."""
    problems = size_problems(folder, files) or hash_problems(folder, files, hashed)
    if problems:
        raise damaged(folder, problems)


def damaged(folder: Path, problems: Sequence[str]) -> CheckpointError:
    """An error that lists the problems of files in a checkpoint, with advice."""
    more = "" if len(problems) <= 5 else f"\n  and {len(problems) - 5} more"
    shown = "\n  ".join(problems[:5])
    return CheckpointError(f"{folder} is damaged; nothing was loaded\n  {shown}{more}\n{_advice(folder)}")


def _advice(folder: Path) -> str:
    """Advice on a damaged checkpoint."""
    step = step_of(folder) or 0
    earlier = [found for found in list_checkpoints(folder.parent) if (step_of(found) or 0) < step]
    other = f"load {earlier[-1]}, the checkpoint before it" if earlier else "start from another checkpoint"
    return f"Copy the folder again from its source, or {other}."


def is_folder_name(name: object) -> bool:
    """Whether a checkpoint can have this name: a single part of a path that is not hidden, as unfinished saves are.

    `latest` is the name of a file.
    """
    if not isinstance(name, str) or name in ("", LATEST):
        return False
    return Path(name).name == name and not name.startswith(".")


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


def latest_checkpoint(root: Path, *, warns: bool = True) -> Path | None:
    """The checkpoint from which `auto` resumes: the one that `latest` names, else the highest complete step."""
    complete = list_checkpoints(root)
    named, reason = named_by_latest(root)
    if named is None:
        if complete and warns:
            logger.warning("event=latest_unusable root=%s reason=%s using=%s", root, reason, complete[-1].name)
        return complete[-1] if complete else None
    step = step_of(named) or 0
    for folder in reversed(complete):
        # A save crashed after it renamed the folder and before it replaced `latest`: this checkpoint is the newest.
        if (step_of(folder) or 0) > step and _previous(folder) == named.name:
            if warns:
                logger.warning("event=latest_behind root=%s using=%s", root, folder.name)
            return folder
    return named


def _previous(folder: Path) -> str | None:
    try:
        return read_manifest(folder).previous
    except CheckpointError:  # reported if it is loaded
        return None


def named_by_latest(root: Path) -> tuple[Path | None, str]:
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
