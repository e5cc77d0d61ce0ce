"""A model that was saved and is to be exported: a run's checkpoint or an adapter, and the base that belongs to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from xorl.ckpt import (
    TEMPLATE_FILE,
    CheckpointError,
    SafetensorsSource,
    WeightSource,
    is_complete,
    read_manifest,
    resolve_folder,
)
from xorl.kernels.quant import QuantScheme
from xorl.lora.peft import CONFIG_FILE, WEIGHTS_FILE
from xorl.train.adapters.folder import AdapterFolder, check_shapes, is_adapter, open_adapter
from xorl.train.architecture import Architecture, architecture_at
from xorl.train.checkpoint_model import find_checkpoint, read_note


@dataclass(frozen=True)
class SavedModel:
    """What there is to export.

    Attributes:
        folder: the checkpoint or the adapter.
        architecture: the model's, without adapters.
        base: its weights under the names of transformers, without the adapter.
        base_path: the folder or Hub id of these weights, None where they are in the checkpoint alone.
        adapter: what stands on them.
        step: of a checkpoint.
        scheme: how the base was quantised while the adapter was trained, where it was.
    """

    folder: Path
    architecture: Architecture
    base: WeightSource
    base_path: str | None
    adapter: AdapterFolder | None
    step: int | None
    scheme: QuantScheme | None


def open_saved(path: str, base: str | None = None, *, merge: bool = False) -> SavedModel:
    """Find a checkpoint (or the newest of a run's folder) or an adapter, and its base; `merge`: to fold them into one.

    `base` names another base of an adapter. Weights that a checkpoint holds are those that were trained, and it never
    takes their place: an adapter that is not merged bears its name alone. Raises ValueError that says what is missing
    or damaged, why an adapter does not fit its base, or why a `base` is not wanted.
    """
    folder = _find(path)
    adapter = open_adapter("PATH", str(folder)) if is_adapter(folder) else None
    manifest = read_manifest(folder) if is_complete(folder) else None
    if manifest is not None and "sweep" in manifest.info:
        members = sorted(path.name for path in (folder / "adapters").iterdir())
        raise ValueError(
            f"PATH: {folder} is a checkpoint of a sweep, which has many adapters: name one of them, such as "
            f"{folder / 'adapters' / members[0]} (there are {', '.join(members)})"
        )
    step = None if manifest is None else manifest.step
    note = None if manifest is None else read_note(folder, manifest)
    scheme = None if note is None else note.scheme
    own = None if note is None else note.weights_in(folder)
    if note is not None and own is not None:
        changed_its_base = adapter is not None and adapter.base != note.base_path
        if base is not None:
            if adapter is None or merge or changed_its_base:
                raise ValueError(f"--base: {folder} holds all weights of its model; leave --base out to export these")
            _check_fits(adapter, base, weights_at("--base", base, note.architecture))
        own.verify()
        base = None if changed_its_base else base or note.base_path
        return SavedModel(folder, note.architecture, own, base, adapter, step, scheme)
    if adapter is None:
        raise ValueError(f"PATH: {folder} holds neither all weights of its model nor an adapter")
    base = base or (None if note is None else note.base_path) or adapter.base
    if base is None:
        raise ValueError(f"--base: {folder} does not say what its base model is; name its folder or Hub id")
    template = _template_in(folder) if note is None else note.architecture.chat_template
    architecture = replace(architecture_at("--base", base), chat_template=template)
    weights = weights_at("--base", base, architecture)
    _check_fits(adapter, base, weights)
    return SavedModel(folder, architecture, weights, base, adapter, step, scheme)


def weights_at(option: str, path: str, architecture: Architecture) -> WeightSource:
    """The weights of the model whose folder or Hub id `option` gives, under the names of its recipes."""
    try:
        source = SafetensorsSource(resolve_folder(path))
    except CheckpointError as error:
        raise CheckpointError(f"{option}: {error}") from error
    return architecture.spec.checkpoint_view(architecture.config, source)


def _check_fits(adapter: AdapterFolder, base: str, weights: WeightSource) -> None:
    check_shapes(adapter, "--base", base, {name: weights.shape(name) for name in weights.names()})


def _template_in(folder: Path) -> str | None:
    file = folder / TEMPLATE_FILE
    return file.read_text(encoding="utf-8") if file.is_file() else None


def _find(path: str) -> Path:
    """The folder of the checkpoint or the adapter that `path` means."""
    given = Path(path).expanduser()
    if not given.is_dir():
        try:
            return resolve_folder(path, patterns=(CONFIG_FILE, WEIGHTS_FILE, TEMPLATE_FILE))
        except CheckpointError as error:
            raise CheckpointError(f"PATH: {error}") from error
    if is_adapter(given):
        return given.absolute()
    if (checkpoint := find_checkpoint(given)) is not None:
        return checkpoint
    hint = "; it holds a model that is exported already" if (given / "config.json").is_file() else ""
    raise ValueError(
        f"PATH: {path} is no checkpoint, no adapter ({CONFIG_FILE}) and no run's folder with checkpoints in it{hint}"
    )
