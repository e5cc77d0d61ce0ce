"""Saves and loads a training state. Saving and loading are collective and verified; a checkpoint appears atomically.

layout.py defines the files of a checkpoint; storage.py reads and writes the tensors.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as format_safetensors

from xorl.ckpt import layout
from xorl.ckpt import publish as publishing
from xorl.ckpt.background import BackgroundWriter
from xorl.ckpt.errors import CheckpointError
from xorl.ckpt.files import FileRecord, share_of_files, write_file
from xorl.ckpt.layout import JSON, Manifest, StorageKind, TensorRecord
from xorl.ckpt.optimizer import OptimizerState
from xorl.ckpt.ranks import all_gather_text, any_rank_holds, broadcast_text, fail_together, num_ranks, this_rank
from xorl.ckpt.regions import Piece, Stored, is_dtensor
from xorl.ckpt.retention import Retention

logger = logging.getLogger(__name__)

AUTO = "auto"
# How many tensors a message lists per problem: layers repeat, so a few names are enough.
_MAX_LISTED = 2
ExtraFilesWriter: TypeAlias = Callable[[Path], Mapping[str, FileRecord]]


class Stateful(Protocol):
    """A part of a training state, for example a `torch.nn.Module`.

    `state_dict` must be flat and hold only tensors, DTensors or `Piece`s that share storage with the object: loading
    copies into them in place, and then passes them to `load_state_dict`. A plain tensor must be the same on every rank.
    Neither method may run a collective.
    """

    def state_dict(self) -> Mapping[str, Stored]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


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
            raise ValueError(f"manager: {manager!r} is unknown; use one of {', '.join(get_args(StorageKind))}")
        self.root = _absolute(root)
        self._manager: StorageKind = manager
        self._retention = retention
        self._root_option = root_option
        self._current: Path | None = None

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
        parameters of the modules in the same state and saved with the numbers of its parameter groups.

        `info` goes into the manifest and `scalars` into a file; both are rank 0's. `rng` is saved per rank.
        `write_extra_files` is called on every rank with the folder; it writes additional files into the folder and
        returns the records of those that this rank wrote. It must raise on every rank or on none.

        With `background`, this returns once copying the state has started, and the files are written in a thread; the
        same checkpoint results. Errors below are then raised by `background.finish`, and `write_extra_files` must not
        read the state nor use process groups other than through this package. `on_published` is called on every rank
        with the checkpoint.

        If any rank fails, all raise, nothing is published, and existing files are untouched. The error is a
        CheckpointError if the caller can correct it (a folder that is not writable, a value that is not a tensor),
        otherwise a CheckpointFailure (a full disk). Saving the step that this object saved or loaded last does nothing.
        Saving any other existing step is a CheckpointError: an existing checkpoint is never overwritten.
        """
        if step < 0:
            raise ValueError(f"step: {step} is negative")
        if replaces and name is None:
            raise ValueError("replaces: only a checkpoint with a name can be replaced")
        final = self.root / (name or layout.checkpoint_name(step))

        def publish(folder: Path, manifest: Manifest) -> None:
            if name is not None:
                publishing.publish_named(folder, final, manifest, replaces=replaces)
            else:
                publishing.publish(folder, self.root, manifest)
                self._prune()

        with fail_together("save a checkpoint"):
            tensors = _flatten(_collect(_stateful(state)))
            small_files = {layout.SCALARS: _json_bytes(scalars or {})} if this_rank() == 0 else {}
            _json_bytes(info or {})  # raises if it cannot be written into the manifest
            if rng:
                values = {key: tensor.contiguous().cpu() for key, tensor in rng.items()}
                small_files[layout.rng_name(this_rank())] = format_safetensors(values)

        def write(tensors: Mapping[str, Stored]) -> None:
            def fill(folder: Path) -> Manifest:
                return self._write(folder, step, tensors, small_files, info or {}, write_extra_files)

            num_bytes = sum(TensorRecord.of(tensor).num_bytes for tensor in tensors.values())
            self._write_and_publish(final, num_bytes, fill, publish, replaces=replaces)
            if on_published is not None:
                on_published(final)

        if background is None:
            write(tensors)
        else:
            background.start(tensors, write)
        return final

    def _write_and_publish(
        self,
        final: Path,
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
                if replaces or not self._exists_already(final):
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
        self._current = final

    def load(
        self,
        path: Path | str,
        state: Mapping[str, Stateful | torch.optim.Optimizer],
        *,
        skip_parts: tuple[str, ...] = (),
    ) -> LoadedCheckpoint:
        """Copy a checkpoint into `state`; any number of ranks and either manager may have saved it.

        `skip_parts` names parts of the saved state that are not loaded.

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
        path = _absolute(path)
        with fail_together(f"load {path}"):
            manifest = layout.read_manifest(path)
            stateful = _stateful(state)
            parts = _collect(stateful)
            tensors = _flatten(parts)
            problems = _differences(tensors, manifest.tensors)
        given = set(all_gather_text(f"{path} (manifest {manifest.digest()})"))
        if len(given) > 1:  # the same on every rank, so all ranks raise
            raise CheckpointError(f"the ranks were given different checkpoints: {', '.join(sorted(given))}")
        # The manifest is the same on every rank, so this list has the same length on every rank.
        held = any_rank_holds([name in tensors for name in sorted(manifest.tensors)])
        skipped = tuple(f"{part}." for part in skip_parts)
        unexpected = [
            name
            for name, is_held in zip(sorted(manifest.tensors), held, strict=True)
            if not is_held and not name.startswith(skipped)
        ]
        with fail_together(f"load {path}"):
            _raise_other_model(path, problems, unexpected)
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
            self._current = path
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

    def _exists_already(self, final: Path) -> bool:
        """Whether this object has already saved or loaded `final`. Raises if anything else exists at that path."""
        if not final.exists():
            return False
        if self._current == final and layout.is_complete(final):
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
    return Path(os.path.abspath(path))


def _stateful(state: Mapping[str, Stateful | torch.optim.Optimizer]) -> dict[str, Stateful]:
    """The state with the state of each optimizer named by the parameters of the modules in it."""
    modules = {name: part for name, part in state.items() if isinstance(part, torch.nn.Module)}
    named = [
        (f"{name}.{path}" if len(modules) > 1 else path, parameter)
        for name, module in modules.items()
        for path, parameter in module.named_parameters()
    ]
    return {
        name: OptimizerState(part, named, with_groups=True) if isinstance(part, torch.optim.Optimizer) else part
        for name, part in state.items()
    }


def _collect(state: Mapping[str, Stateful]) -> dict[str, dict[str, Stored]]:
    parts: dict[str, dict[str, Stored]] = {}
    for name, part in state.items():
        if not name or "." in name:
            raise CheckpointError(
                f"state: {name!r} is not a valid name for a part of the state; use a non-empty name without dots"
            )
        parts[name] = {}
        for key, value in part.state_dict().items():
            if not isinstance(value, (torch.Tensor, Piece)):
                kind = type(value).__name__
                raise CheckpointError(
                    f"state: {name}.{key} is of type {kind}; only tensors can be saved (numbers go to scalars)"
                )
            held = value.tensor if isinstance(value, Piece) else value
            partial = is_dtensor(held) and any(placement.is_partial() for placement in held.placements)
            if held.layout != torch.strided or held.is_meta or partial:
                raise CheckpointError(
                    f"state: {name}.{key} is sparse, on the meta device or a partial sum; it cannot be saved"
                )
            parts[name][key] = value if isinstance(value, Piece) else value.detach()
    return parts


def _flatten(parts: Mapping[str, Mapping[str, Stored]]) -> dict[str, Stored]:
    """Flatten to `{part}.{key}`, which is unambiguous because part names contain no dots."""
    return {f"{name}.{key}": tensor for name, part in parts.items() for key, tensor in part.items()}


def _describe_meshes(tensors: Mapping[str, Stored]) -> list[dict[str, list[str] | list[int]]]:
    """The names and axis sizes of the distinct device meshes over which the tensors are sharded."""
    held = [tensor.tensor if isinstance(tensor, Piece) else tensor for tensor in tensors.values()]
    meshes = {tensor.device_mesh for tensor in held if is_dtensor(tensor)}
    described = {(tuple(mesh.mesh_dim_names or ()), tuple(mesh.shape)) for mesh in meshes}
    return [{"axes": list(names), "sizes": list(sizes)} for names, sizes in sorted(described)]


def _differences(tensors: Mapping[str, Stored], saved: Mapping[str, TensorRecord]) -> dict[str, list[str]]:
    missing = [name for name in tensors if name not in saved]
    changed: list[str] = []
    for name, tensor in tensors.items():
        expected, found = TensorRecord.of(tensor), saved.get(name)
        if found is not None and found != expected:
            changed.append(
                f"{name}: saved as {found.dtype}{list(found.shape)}, expected {expected.dtype}{list(expected.shape)}"
            )
    return {"missing from the checkpoint": missing, "with a different shape or dtype": changed}


def _raise_other_model(path: Path, problems: Mapping[str, list[str]], unexpected: list[str]) -> None:
    listed = {**problems, "only in the checkpoint": unexpected}
    if not any(listed.values()):
        return
    lines = [f"{path} was saved by another model or training set-up; nothing was loaded"]
    for title, names in listed.items():
        if names:
            shown = names[:_MAX_LISTED]
            lines.append(f"  {title} ({len(names)}): {', '.join(shown)}{', ...' if len(names) > len(shown) else ''}")
    lines.append(
        "Resume with the model, optimizer and options of the saved run, or start a new run from its exported weights."
    )
    raise CheckpointError("\n".join(lines))


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
