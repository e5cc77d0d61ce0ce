"""Saves and loads a training state: collective, verified, published atomically.

layout.py defines the files of a checkpoint; sharded.py and gathered.py turn tensors into files.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, cast, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as format_safetensors
from torch.distributed.tensor import DTensor

from xorl.ckpt import gathered, layout, sharded
from xorl.ckpt.errors import CheckpointError
from xorl.ckpt.files import FileRecord, check_hashes, check_sizes, share_of_files, write_file
from xorl.ckpt.layout import JSON, Manifest, StorageKind, TensorRecord
from xorl.ckpt.metadata import read_metadata
from xorl.ckpt.ranks import agreed, all_gather_text, any_rank_holds, broadcast_text, num_ranks, this_rank
from xorl.ckpt.regions import describe_meshes

logger = logging.getLogger(__name__)

AUTO = "auto"
# The limit of each list of tensors in a message: layers repeat, so a few names are enough.
_SHOWN = 2
FurtherFiles: TypeAlias = Callable[[Path], Mapping[str, FileRecord]]


class Stateful(Protocol):
    """A part of a training state. `torch.nn.Module` is one.

    `state_dict` is flat and holds only tensors (DTensors too), which must be the object's own storage: loading copies
    into them in place, and then passes them to `load_state_dict`. A plain tensor must be the same on every rank.
    Neither method may run a collective.
    """

    def state_dict(self) -> Mapping[str, torch.Tensor]: ...

    def load_state_dict(self, state_dict: dict[str, torch.Tensor], /) -> object: ...


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The contents of a checkpoint besides the state. `rng` is None if a different number of ranks saved it."""

    step: int
    info: Mapping[str, JSON]
    scalars: Mapping[str, JSON]
    rng: dict[str, torch.Tensor] | None
    path: Path


class Checkpointer:
    """The checkpoints under one root.

    `save` and `load` are collective over the default process group, if there is one. `keep_last` removes
    older checkpoints after a save; None keeps all. `root_option` is how the user chose the root, for error messages.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        manager: StorageKind = "dcp",
        keep_last: int | None = None,
        root_option: str = "root",
    ) -> None:
        if manager not in get_args(StorageKind):
            raise ValueError(f"manager: {manager!r} is unknown; use one of {', '.join(get_args(StorageKind))}")
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last: {keep_last} keeps no checkpoint; use a number above 0, or None to keep all")
        self.root = _normal(root)
        self._manager: StorageKind = manager
        self._keep_last = keep_last
        self._root_option = root_option
        self._current: Path | None = None

    def save(
        self,
        step: int,
        state: Mapping[str, Stateful],
        *,
        info: Mapping[str, JSON] | None = None,
        scalars: Mapping[str, JSON] | None = None,
        rng: Mapping[str, torch.Tensor] | None = None,
        write_further: FurtherFiles | None = None,
        name: str | None = None,
        replaces: bool = False,
    ) -> Path:
        """Publish `{root}/global_step_{step}` and move `latest` to it.

        With a `name` it becomes `{root}/{name}`, and `latest` does not change. `replaces` allows a checkpoint of this
        name to exist; the old one stays complete until the new one takes its place.

        Rank 0's `info` goes into the manifest, its `scalars` into a file; `rng` is each rank's own. `write_further` is
        called on every rank with the folder, writes additional files into it and returns those of this rank; it must
        raise on every rank or on none.

        If any rank fails, all raise, nothing is published, and existing files are untouched. They raise CheckpointError
        for errors that the caller can correct (a folder that is not writable, a value that is not a tensor),
        CheckpointFailure otherwise (a full disk). Saving the step that this object saved or loaded last does nothing.
        Any other existing step is a CheckpointError: an existing checkpoint is never overwritten.
        """
        assert step >= 0, f"there is no step {step}"
        assert name is not None or not replaces, "a step is never saved again"
        final = self.root / (name or layout.checkpoint_name(step))
        with agreed("save a checkpoint"):
            folder, exists = final, False
            if this_rank() == 0:
                layout.prepare_root(self.root, self._root_option)
                exists = not replaces and self._exists_already(final)
                folder = final if exists else layout.begin(self.root, final.name)
        folder = Path(broadcast_text(str(folder)))
        if folder == final:
            return final
        try:
            manifest = self._write(folder, step, state, info or {}, scalars or {}, rng or {}, write_further)
            with agreed("publish a checkpoint"):
                if this_rank() == 0 and name is not None:
                    layout.publish_named(folder, final, manifest, replaces=replaces)
                elif this_rank() == 0:
                    layout.publish(folder, self.root, manifest)
                    self._prune()
        except Exception:
            if this_rank() == 0:
                self._clean_up()
            raise
        self._current = final
        return final

    def load(
        self, path: Path | str, state: Mapping[str, Stateful], *, leaves_out: tuple[str, ...] = ()
    ) -> LoadedCheckpoint:
        """Copy a checkpoint into `state`, whatever number of ranks and whichever manager saved it.

        `leaves_out` names parts of the saved state that are not loaded.

        Before any value is copied, every file is checked against its hash, and every tensor's name, shape and dtype
        against the manifest. Raises CheckpointError on every rank if the checkpoint is damaged or belongs to another
        model.
        """
        return self.checked(path, state, leaves_out=leaves_out)()

    def checked(
        self, path: Path | str, state: Mapping[str, Stateful], *, leaves_out: tuple[str, ...] = ()
    ) -> Callable[[], LoadedCheckpoint]:
        """All of `load` that changes nothing; what it returns copies the values, and is called once, on every rank."""
        path = _normal(path)
        with agreed(f"load {path}"):
            manifest = layout.read_manifest(path)
            parts = _collect(state)
            tensors = _flat(parts)
            problems = _differences(tensors, manifest.tensors)
        _require_same_text("checkpoint", f"{path} (manifest {manifest.digest()})")
        # The manifest is the same on every rank, so this list has the same length everywhere.
        held = any_rank_holds([name in tensors for name in sorted(manifest.tensors)])
        unwanted = tuple(f"{part}." for part in leaves_out)
        unexpected = [
            name
            for name, is_held in zip(sorted(manifest.tensors), held, strict=True)
            if not is_held and not name.startswith(unwanted)
        ]
        with agreed(f"load {path}"):
            _raise_other_model(path, problems, unexpected)
            check_sizes(path, manifest.files)
            check_hashes(path, manifest.files, share_of_files(manifest.files, this_rank(), num_ranks()))

        def copy() -> LoadedCheckpoint:
            self._read_tensors(path, manifest, tensors)
            with agreed(f"load {path}"):
                for name, part in state.items():
                    part.load_state_dict(parts[name])
                scalars = cast(dict[str, JSON], json.loads((path / layout.SCALARS).read_text(encoding="utf-8")))
                rng = _read_rng(path, manifest)
            self._current = path
            return LoadedCheckpoint(manifest.step, manifest.info, scalars, rng, path)

        return copy

    def latest(self) -> Path | None:
        """The checkpoint that `auto` selects, or None if there is none. Not collective."""
        return layout.latest_checkpoint(self.root)

    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, by step."""
        return layout.list_checkpoints(self.root)

    def resolve(self, path_or_auto: Path | str) -> Path:
        """The checkpoint folder for `auto`, for a path, or for the name of a checkpoint under the root."""
        if str(path_or_auto) == AUTO:
            latest = self.latest()
            if latest is None:
                raise CheckpointError(f"there is no checkpoint in {self.root}")
            return latest
        given = Path(path_or_auto).expanduser()
        for folder in (given, self.root / given):
            if layout.is_complete(folder):
                return _normal(folder)
        # The checkpoints of a run's folder are one level below it.
        places = (given, given / self.root.name, self.root)
        within = next((found for place in places if (found := layout.list_checkpoints(place))), [])
        known = f"There are {', '.join(map(str, within[-3:]))}" if within else f"There are none in {self.root} either"
        reason = "is no complete checkpoint" if given.is_dir() else "does not exist"
        raise CheckpointError(f"{given} {reason}. {known}")

    def _exists_already(self, final: Path) -> bool:
        """Whether this step is saved already. Raises if another folder is in the way."""
        if not final.exists():
            return False
        if self._current == final and layout.is_complete(final):
            return True
        raise CheckpointError(
            f"{self._root_option}: {final} exists already, and a checkpoint is never overwritten. Move it away, resume "
            "from it, or choose another folder."
        )

    def _write(
        self,
        folder: Path,
        step: int,
        state: Mapping[str, Stateful],
        info: Mapping[str, JSON],
        scalars: Mapping[str, JSON],
        rng: Mapping[str, torch.Tensor],
        write_further: FurtherFiles | None,
    ) -> Manifest:
        """Collective: writes all files but the manifest, which it returns; only rank 0's is complete."""
        with agreed("save a checkpoint"):
            tensors = _flat(_collect(state))
            files: dict[str, FileRecord] = {}
            if this_rank() == 0:
                files[layout.SCALARS] = write_file(folder / layout.SCALARS, _json_bytes(scalars))
                _json_bytes(info)
            if rng:
                content = format_safetensors({name: tensor.contiguous().cpu() for name, tensor in rng.items()})
                files[layout.rng_name(this_rank())] = write_file(folder / layout.rng_name(this_rank()), content)
        write = sharded.write_shards if self._manager == "dcp" else gathered.write_gathered
        written, records = write(tensors, folder)
        files |= written
        if write_further is not None:
            files |= write_further(folder)
        texts = all_gather_text(json.dumps({name: vars(record) for name, record in files.items()}))
        return Manifest(
            step=step,
            storage=self._manager,
            world_size=num_ranks(),
            mesh=describe_meshes(list(tensors.values())),
            info=info,
            tensors=records,
            files={name: FileRecord(**record) for text in texts for name, record in json.loads(text).items()},
        )

    def _read_tensors(self, path: Path, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        if manifest.storage == "dcp":
            with agreed(f"load {path}"):
                metadata = read_metadata(path, manifest.files)
            sharded.read_shards(tensors, path, metadata)
        else:
            with agreed(f"load {path}"):
                gathered.read_gathered(tensors, path)

    def _clean_up(self) -> None:
        try:
            layout.remove_leftovers(self.root)
        except OSError as error:
            # The next save tries again; the original failure is the one to report.
            logger.warning("event=leftover_kept root=%s error=%s", self.root, error)

    def _prune(self) -> None:
        if self._keep_last is None:
            return
        try:
            for folder in layout.prune(self.root, self._keep_last):
                logger.info("event=checkpoint_pruned path=%s", folder)
        except OSError as error:
            # The new checkpoint is published; failing to delete an old one does not end the run.
            logger.warning("event=prune_failed root=%s error=%s", self.root, error)


def _normal(path: Path | str) -> Path:
    """Absolute, since the working folder may change, and comparable."""
    return Path(os.path.abspath(path))


def _collect(state: Mapping[str, Stateful]) -> dict[str, dict[str, torch.Tensor]]:
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, part in state.items():
        if not name or "." in name:
            raise CheckpointError(f"state: {name!r} cannot name a part of the state; use a name without dots")
        parts[name] = {}
        for key, value in part.state_dict().items():
            if not isinstance(value, torch.Tensor):
                kind = type(value).__name__
                raise CheckpointError(
                    f"state: {name}.{key} is of type {kind}; only tensors are saved (numbers: scalars)"
                )
            partial = isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements)
            if value.layout != torch.strided or value.is_meta or partial:
                raise CheckpointError(
                    f"state: {name}.{key} is sparse, on the meta device or not reduced; it has no values"
                )
            parts[name][key] = value.detach()
    return parts


def _flat(parts: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Flattens to `{part}.{key}`, which is unambiguous, since a part's name has no dot."""
    return {f"{name}.{key}": tensor for name, part in parts.items() for key, tensor in part.items()}


def _differences(tensors: Mapping[str, torch.Tensor], saved: Mapping[str, TensorRecord]) -> dict[str, list[str]]:
    missing = [name for name in tensors if name not in saved]
    changed: list[str] = []
    for name, tensor in tensors.items():
        wanted = TensorRecord.of(tensor)
        if name in saved and saved[name] != wanted:
            has = saved[name]
            changed.append(f"{name}: saved as {has.dtype}{list(has.shape)}, wanted {wanted.dtype}{list(wanted.shape)}")
    return {"missing in the checkpoint": missing, "of another shape or dtype": changed}


def _raise_other_model(path: Path, problems: Mapping[str, list[str]], unexpected: list[str]) -> None:
    listed = {**problems, "in the checkpoint alone": unexpected}
    if not any(listed.values()):
        return
    lines = [f"{path} is a checkpoint of another model or another training set-up; nothing was loaded"]
    for title, names in listed.items():
        if names:
            shown = names[:_SHOWN]
            lines.append(f"  {title} ({len(names)}): {', '.join(shown)}{', ...' if len(names) > len(shown) else ''}")
    lines.append(
        "Resume with the model, optimizer and options of the saved run, or start afresh from its exported weights."
    )
    raise CheckpointError("\n".join(lines))


def _require_same_text(what: str, text: str) -> None:
    """Collective. Every rank sees the same texts, so either all ranks raise or none."""
    told = all_gather_text(text)
    if any(other != told[0] for other in told):
        raise CheckpointError(f"the ranks were given different values for the {what}: {', '.join(sorted(set(told)))}")


def _read_rng(path: Path, manifest: Manifest) -> dict[str, torch.Tensor] | None:
    name = layout.rng_name(this_rank())
    if manifest.world_size != num_ranks() or name not in manifest.files:
        return None
    try:
        return parse_safetensors((path / name).read_bytes())
    except SafetensorError as error:
        raise CheckpointError(f"{path / name} cannot be used: {error}") from error


def _json_bytes(content: Mapping[str, JSON]) -> bytes:
    try:
        return json.dumps(content, allow_nan=False, indent=1).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"info and scalars must be JSON with finite numbers: {error}") from error
