"""Saves and loads a training state. Saving and loading are collective and verified; a checkpoint appears atomically.

layout.py defines the files of a checkpoint; storage.py reads and writes the tensors.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as format_safetensors

from xorl.ckpt import layout
from xorl.ckpt import publish as publishing
from xorl.ckpt.background import BackgroundWriter
from xorl.ckpt.errors import CheckpointError, is_count, require
from xorl.ckpt.files import FileRecord, share_of_files, write_file
from xorl.ckpt.layout import JSON, Manifest, StorageKind, TensorRecord
from xorl.ckpt.ranks import all_gather_text, any_rank_holds, broadcast_text, fail_together, num_ranks, this_rank
from xorl.ckpt.regions import Piece, Stored, is_dtensor
from xorl.ckpt.retention import Retention
from xorl.ckpt.state import Stateful, collect, differences, flatten, raise_other_model, stateful_parts

logger = logging.getLogger(__name__)

AUTO = "auto"
ExtraFilesWriter: TypeAlias = Callable[[Path], Mapping[str, FileRecord]]


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The contents of a checkpoint other than the state; `rng` is None if it was saved on another number of ranks."""

    step: int
    info: Mapping[str, JSON]
    scalars: Mapping[str, JSON]
    rng: dict[str, torch.Tensor] | None
    path: Path


class Checkpointer:
    """The checkpoints under one root.

    `save` and `load` are collective over the default process group, if there is one. Each save removes the checkpoints
    that `retention` does not keep; None keeps all. `root_option` is the option that sets the root, for error messages.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        manager: StorageKind = "dcp",
        retention: Retention | None = None,
        root_option: str = "root",
    ) -> None:
        if manager not in get_args(StorageKind):
            raise CheckpointError(f"manager: {manager!r} is unknown; use one of {', '.join(get_args(StorageKind))}")
        is_retention = retention is None or isinstance(retention, Retention)
        require("retention", retention, is_retention, "a Retention, such as Retention(last=3)")
        self.root = _absolute(root)
        self._manager: StorageKind = manager
        self._retention = retention
        self._root_option = root_option
        self._current: tuple[Path, int] | None = None  # the checkpoint saved or loaded last, and its step

    def save(
        self,
        step: int,
        state: Mapping[str, Stateful | torch.optim.Optimizer],
        *,
        info: Mapping[str, JSON] | None = None,
        scalars: Mapping[str, JSON] | None = None,
        rng: Mapping[str, torch.Tensor] | None = None,
        write_extra_files: ExtraFilesWriter | None = None,
        name: str | None = None,
        replaces: bool = False,
        background: BackgroundWriter | None = None,
        on_published: Callable[[Path], object] | None = None,
    ) -> Path:
        """Publish `{root}/global_step_{step}` and point `latest` to it.

        With a `name`, the checkpoint is `{root}/{name}` instead, and `latest` does not change. `replaces` allows an
        existing checkpoint of that name; it stays complete until the new one replaces it.

        A part of the state is a `Stateful`, such as a module, or an optimizer of torch, whose state is named by the
        parameters of the modules in the same state and saved with the hyperparameters of its parameter groups.

        `info` goes into the manifest and `scalars` into a file; both are rank 0's. `rng` is saved per rank.
        `write_extra_files` is called on every rank with the folder; it writes additional files into the folder and
        returns the records of those that this rank wrote. It must raise on every rank or on none.

        With `background`, this returns once copying the state has started, and the files are written in a thread; the
        same checkpoint results. Errors below are then raised by `background.finish`, and `write_extra_files` must not
        read the state nor use process groups other than through this package. `on_published` is called on every rank
        with the checkpoint.

        If any rank fails, all raise, nothing is published, and existing files are untouched. The error is a
        CheckpointError if the caller can correct it (a folder that is not writable, a value that is not a tensor),
        otherwise a CheckpointFailure (a full disk). Saving the step that this object saved or loaded last, under the
        same name, does nothing. Saving any other existing one is a CheckpointError: an existing checkpoint is never
        overwritten.
        """
        with fail_together("save a checkpoint"):
            _check_save(step, info, scalars, rng, name, replaces=replaces)
            _check_functions(write_extra_files=write_extra_files, on_published=on_published)
            is_writer = background is None or isinstance(background, BackgroundWriter)
            require("background", background, is_writer, "a BackgroundWriter")
            if self._retention is not None and self._current is None and name is None and this_rank() == 0:
                # Raises for losses that cannot be used. Once, because reading them may take a while.
                self._retention.kept(())
            parts = stateful_parts(state)
            require("state", state, bool(parts), "a mapping of names to one part or more")
            tensors = flatten(collect(parts))
            small_files = {layout.SCALARS: _json_bytes("scalars", scalars or {})} if this_rank() == 0 else {}
            _json_bytes("info", info or {})  # raises if it cannot be written into the manifest
            if rng:
                values = {key: tensor.contiguous().cpu() for key, tensor in rng.items()}
                small_files[layout.rng_name(this_rank())] = format_safetensors(values)
        targets = dict.fromkeys(all_gather_text(f"step {step}" if name is None else f"step {step} as {name!r}"))
        if len(targets) > 1:  # the same on every rank, so all ranks raise
            raise CheckpointError(f"step: the ranks save different checkpoints: {', '.join(list(targets)[:4])}")
        final = self.root / (layout.checkpoint_name(step) if name is None else name)

        def publish(folder: Path, manifest: Manifest) -> None:
            if name is not None:
                publishing.publish_named(folder, final, manifest, replaces=replaces)
            else:
                publishing.publish(folder, self.root, manifest)
                self._prune()

        def write(tensors: Mapping[str, Stored]) -> None:
            def fill(folder: Path) -> Manifest:
                return self._write(folder, step, tensors, small_files, info or {}, write_extra_files)

            num_bytes = sum(TensorRecord.of(tensor).num_bytes for tensor in tensors.values())
            self._write_and_publish(final, step, num_bytes, fill, publish, replaces=replaces)
            if on_published is not None:
                on_published(final)

        if background is None:
            write(tensors)
        else:
            background.start(tensors, write, final)
        return final

    def _write_and_publish(
        self,
        final: Path,
        step: int,
        num_bytes: int,
        fill: Callable[[Path], Manifest],
        publish: Callable[[Path, Manifest], None],
        *,
        replaces: bool,
    ) -> None:
        """Collective: `fill` a folder, and `publish` it as `final` on rank 0; nothing if `final` is the current one."""
        with fail_together("save a checkpoint"):
            folder = final
            if this_rank() == 0:
                publishing.prepare_root(self.root, self._root_option)
                if replaces or not self._exists_already(final, step):
                    publishing.remove_leftovers(self.root)
                    publishing.require_space(self.root, num_bytes)
                    folder = publishing.create_folder(self.root, final.name)
        folder = Path(broadcast_text(str(folder)))
        if folder == final:
            return
        try:
            manifest = fill(folder)
            with fail_together("publish a checkpoint"):
                if this_rank() == 0:
                    publish(folder, manifest)
        except Exception:
            if this_rank() == 0:
                publishing.discard(folder)
            raise
        self._current = final, step

    def load(
        self,
        path: Path | str,
        state: Mapping[str, Stateful | torch.optim.Optimizer],
        *,
        skip_parts: tuple[str, ...] = (),
    ) -> LoadedCheckpoint:
        """Copy a checkpoint into `state`; any number of ranks and either manager may have saved it.

        `skip_parts` names parts of the saved state that are not loaded, even if `state` has them; a part may be skipped
        although none is saved.

        Before any value is copied, every file is checked against its hash, and every tensor's name, shape and dtype
        against the manifest. Raises CheckpointError on every rank if the checkpoint is damaged or belongs to another
        model.
        """
        return self.prepare_load(path, state, skip_parts=skip_parts)()

    def prepare_load(
        self,
        path: Path | str,
        state: Mapping[str, Stateful | torch.optim.Optimizer],
        *,
        skip_parts: tuple[str, ...] = (),
    ) -> Callable[[], LoadedCheckpoint]:
        """Run the checks of `load` without changing anything; returns a function that copies the values.

        Both this method and the function are collective. Call the function at most once.
        """
        with fail_together(f"load {path}"):
            is_path = isinstance(path, (str, Path))
            require("path", path, is_path, "the folder of a checkpoint, such as checkpointer.resolve('auto')")
            given, path = path, _absolute(path)
            is_names = isinstance(skip_parts, (tuple, list, set, frozenset))
            require("skip_parts", skip_parts, is_names, 'a tuple of names, such as ("optimizer",)')
            if not path.exists():
                raise CheckpointError(
                    f"path: there is no folder {path}. For 'auto' or a name under the root pass resolve({str(given)!r})"
                )
            manifest = layout.read_manifest(path)
            stateful = {
                name: part for name, part in stateful_parts(state, manifest.tensors).items() if name not in skip_parts
            }
            parts = collect(stateful, manifest.tensors)
            tensors = flatten(parts)
            problems = differences(tensors, manifest.tensors)
        digests = set(all_gather_text(f"{path} (manifest {manifest.digest()})"))
        if len(digests) > 1:  # the same on every rank, so all ranks raise
            raise CheckpointError(f"the ranks were given different checkpoints: {', '.join(sorted(digests))}")
        # The manifest is the same on every rank, so this list has the same length on every rank.
        held = any_rank_holds([name in tensors for name in sorted(manifest.tensors)])
        skipped = tuple(f"{part}." for part in skip_parts)
        unexpected = [
            name
            for name, is_held in zip(sorted(manifest.tensors), held, strict=True)
            if not is_held and not name.startswith(skipped)
        ]
        with fail_together(f"load {path}"):
            raise_other_model(path, problems, unexpected, parts)
            layout.require_intact(path, manifest.files, share_of_files(manifest.files, this_rank(), num_ranks()))

        # torch's distributed checkpoints take a second to import.
        from xorl.ckpt.metadata import read_metadata  # noqa: PLC0415
        from xorl.ckpt.storage import read_gathered, read_shards  # noqa: PLC0415

        def copy() -> LoadedCheckpoint:
            with fail_together(f"load {path}"):
                metadata = read_metadata(path, manifest.files) if manifest.storage == "dcp" else None
                if metadata is None:
                    read_gathered(tensors, path)
            if metadata is not None:
                read_shards(tensors, path, metadata)
            with fail_together(f"load {path}"):
                for name, part in stateful.items():
                    part.load_state_dict(parts[name])
                scalars = cast(dict[str, JSON], json.loads((path / layout.SCALARS).read_text(encoding="utf-8")))
                rng = _read_rng(path, manifest)
            self._current = path, manifest.step
            return LoadedCheckpoint(manifest.step, manifest.info, scalars, rng, path)

        return copy

    def complete_interrupted(self, resumed: Path | None) -> None:
        """Finish what a process that died had begun: publishing, and removing old checkpoints. Not collective.

        Call it on one rank before a run starts from `resumed`; failures are only logged.
        """
        try:
            if self.root.is_dir():
                publishing.complete_interrupted(self.root)
        except OSError as error:
            # The next save tries again, and reports the disk's problem if it lasts.
            logger.warning("event=leftover_kept root=%s error=%s", self.root, error)
        if resumed is not None and resumed == self.latest():  # a run that goes back starts from an old one
            self._prune()

    @property
    def removes_old(self) -> bool:
        """Whether saves remove old checkpoints."""
        return self._retention is not None

    def latest(self) -> Path | None:
        """The checkpoint that `auto` selects, or None if there is none. Not collective."""
        return layout.latest_checkpoint(self.root)

    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, by step."""
        return layout.list_checkpoints(self.root)

    def resolve(self, path_or_auto: Path | str) -> Path:
        """The checkpoint folder for `auto`, a path, or the name of a checkpoint under the root."""
        if str(path_or_auto) == AUTO:
            latest = self.latest()
            if latest is None:
                raise CheckpointError(f"there is no checkpoint in {self.root}")
            return latest
        given = Path(path_or_auto).expanduser()
        for folder in (given, self.root / given):
            if layout.is_complete(folder):
                return _absolute(folder)
        # A run keeps its checkpoints one level below its folder.
        roots = (given, given / self.root.name, self.root)
        nearby = next((found for root in roots if (found := layout.list_checkpoints(root))), [])
        known = f"Found {', '.join(map(str, nearby[-3:]))}" if nearby else f"There are none in {self.root} either"
        reason = "is not a complete checkpoint" if given.is_dir() else "does not exist"
        raise CheckpointError(f"{given} {reason}. {known}")

    def _exists_already(self, final: Path, step: int) -> bool:
        """Whether this object has just saved or loaded this step as `final`. Raises if anything else exists there."""
        if not final.exists():
            return False
        if self._current == (final, step) and layout.is_complete(final):
            return True
        raise CheckpointError(
            f"{self._root_option}: {final} already exists, and checkpoints are never overwritten. Move it away, resume "
            "from it, or choose another folder."
        )

    def _write(
        self,
        folder: Path,
        step: int,
        tensors: Mapping[str, Stored],
        small_files: Mapping[str, bytes],
        info: Mapping[str, JSON],
        write_extra_files: ExtraFilesWriter | None,
    ) -> Manifest:
        """Collective: write all files except the manifest, and return it. Only rank 0's manifest is complete."""
        from xorl.ckpt.storage import write_gathered, write_shards  # noqa: PLC0415 - takes a second

        with fail_together("save a checkpoint"):
            files = {name: write_file(folder / name, content) for name, content in small_files.items()}
        written, records = (write_shards if self._manager == "dcp" else write_gathered)(tensors, folder)
        files |= written
        if write_extra_files is not None:
            files |= write_extra_files(folder)
        texts = all_gather_text(json.dumps({name: vars(record) for name, record in files.items()}))
        return Manifest(
            step=step,
            storage=self._manager,
            world_size=num_ranks(),
            mesh=_describe_meshes(tensors),
            info=info,
            tensors=records,
            files={name: FileRecord(**record) for text in texts for name, record in json.loads(text).items()},
        )

    def _prune(self) -> None:
        if self._retention is None:
            return
        try:
            steps = [step for folder in self.checkpoints() if (step := layout.step_of(folder)) is not None]
            for folder in publishing.prune(self.root, self._retention.kept(steps)):
                logger.info("event=checkpoint_pruned path=%s", folder)
        except OSError as error:
            # The new checkpoint is published; a failure to delete an old one should not end the run.
            logger.warning("event=prune_failed root=%s error=%s", self.root, error)


def _absolute(path: Path | str) -> Path:
    """Absolute and normalised: the working directory may change, and paths are compared."""
    return Path(os.path.abspath(Path(path).expanduser()))


def _check_save(step: object, info: object, scalars: object, rng: object, name: object, *, replaces: bool) -> None:
    require("step", step, is_count(step, 0), "an int of at least 0")
    for argument, value in (("info", info), ("scalars", scalars)):
        is_mapping = value is None or isinstance(value, Mapping)
        require(argument, value, is_mapping, 'a mapping of names to JSON values, such as {"epoch": 3}')
    is_tensors = rng is None or (isinstance(rng, Mapping) and all(isinstance(v, torch.Tensor) for v in rng.values()))
    require("rng", rng, is_tensors, 'a mapping of names to tensors, such as {"torch": torch.get_rng_state()}')
    require("name", name, name is None or layout.is_folder_name(name), "the name of a folder directly under the root")
    if name is not None and layout.step_of(Path(str(name))) not in (None, step):
        raise CheckpointError(f"name: {name!r} is the name of another step than {step}, the step that is saved")
    if replaces and name is None:
        raise CheckpointError("replaces: only a checkpoint with a name can be replaced")


def _check_functions(**functions: object) -> None:
    for argument, function in functions.items():
        require(argument, function, function is None or callable(function), "a function of a checkpoint's folder")


def _describe_meshes(tensors: Mapping[str, Stored]) -> list[dict[str, list[str] | list[int]]]:
    """The names and axis sizes of the distinct device meshes over which the tensors are sharded."""
    held = [tensor.tensor if isinstance(tensor, Piece) else tensor for tensor in tensors.values()]
    meshes = {tensor.device_mesh for tensor in held if is_dtensor(tensor)}
    described = {(tuple(mesh.mesh_dim_names or ()), tuple(mesh.shape)) for mesh in meshes}
    return [{"axes": list(names), "sizes": list(sizes)} for names, sizes in sorted(described)]


def _read_rng(path: Path, manifest: Manifest) -> dict[str, torch.Tensor] | None:
    name = layout.rng_name(this_rank())
    if manifest.world_size != num_ranks() or name not in manifest.files:
        return None
    try:
        return parse_safetensors((path / name).read_bytes())
    except SafetensorError as error:
        raise CheckpointError(f"{path / name} cannot be used: {error}") from error


def _json_bytes(argument: str, content: Mapping[str, JSON]) -> bytes:
    for key in _keys_of(content):
        if not isinstance(key, str):
            raise CheckpointError(
                f"{argument}: the key {key!r} would come back as a string, because JSON has no other keys; convert it "
                "before saving and after loading"
            )
    try:
        return json.dumps(content, allow_nan=False, indent=1).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{argument}: must be JSON with finite numbers: {error}") from error


def _keys_of(content: object) -> Iterator[object]:
    """The keys of all mappings in `content`."""
    if isinstance(content, Mapping):
        yield from content
    if isinstance(content, (Mapping, list, tuple)):
        for value in content.values() if isinstance(content, Mapping) else content:
            yield from _keys_of(value)
