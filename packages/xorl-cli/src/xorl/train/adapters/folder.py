"""A folder with an adapter in PEFT's format, of whoever wrote it: found, read, and held against a base model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from xorl.ckpt import (
    CheckpointError,
    CheckpointFailure,
    SafetensorsSource,
    WeightRecipe,
    is_complete,
    load_weights,
    resolve_folder,
    verify,
)
from xorl.lora import base_parameters
from xorl.lora.peft import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterConfig,
    AdapterLayout,
    ReplacedTensors,
    differences,
    load_adapters,
    read_layout,
)

_SHOWN = 5


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter that was read and is whole; `option` is how the user named it, for messages."""

    option: str
    folder: Path
    layout: AdapterLayout
    source: SafetensorsSource

    @property
    def base(self) -> str | None:
        """The base model that it says it is for."""
        return self.layout.config.base


def is_adapter(folder: Path) -> bool:
    """Whether there is an adapter in this folder."""
    return (folder / CONFIG_FILE).is_file()


def open_adapter(option: str, path: str) -> AdapterFolder:
    """The adapter in a folder, or in a repository of the Hub. Not collective: every rank reads it.

    Raises ValueError that begins with `option` and names the file where it is none, not whole, or of a kind that is not
    built; CheckpointFailure where the Hub cannot be reached. Of a checkpoint of ours, hashes are checked.
    """
    try:
        folder = resolve_folder(path, patterns=(CONFIG_FILE, WEIGHTS_FILE))
        file = folder / CONFIG_FILE
        if not file.is_file():
            raise CheckpointError(f"{folder} holds no adapter: there is no {CONFIG_FILE} in it")
        if is_complete(folder):
            verify(folder, names=(CONFIG_FILE, WEIGHTS_FILE))
        source = SafetensorsSource(folder, single_file=WEIGHTS_FILE)
    except (CheckpointError, CheckpointFailure) as error:
        raise type(error)(f"{option}: {error}") from error
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not a mapping")
        config = AdapterConfig.from_json(content)
    except ValueError as error:
        raise ValueError(f"{option}: {file}: {error}") from error
    try:
        layout = read_layout(config, source)
    except ValueError as error:
        raise ValueError(f"{option}: {folder / WEIGHTS_FILE}: {error}") from error
    return AdapterFolder(option, folder, layout, source)


def load_adapter(module: nn.Module, adapter: AdapterFolder, recipes: Mapping[str, WeightRecipe]) -> None:
    """Give a model, whole or sharded, with adapters of `adapter.layout.spec` their values; collective.

    The base's weights must be there. Tensors of the base that the file brings take the place of the base's own.
    """
    replaced = ReplacedTensors(adapter.layout, adapter.source)
    held = set(replaced.names())
    brought = {name: recipe for name, recipe in recipes.items() if held.issuperset(recipe.sources)}
    if held:
        parameters = base_parameters(module)
        load_weights({name: parameters[name] for name in brought}, brought, replaced, mode="all_ranks")
    load_adapters(module, adapter.layout, adapter.source)


def check_shapes(adapter: AdapterFolder, base_option: str, base: str, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError unless an adapter fits a base model whose tensors have these names and shapes.

    It names the options and the file, and says which layers differ in what.
    """
    problems = differences(adapter.layout, shapes)
    if not problems:
        return
    named = f" for {adapter.base}" if adapter.base else ""
    told = "\n  ".join([*problems[:_SHOWN], *([f"... and {len(problems) - _SHOWN} more"] * (len(problems) > _SHOWN))])
    raise ValueError(
        f"{adapter.option}: the adapter in {adapter.folder / WEIGHTS_FILE} was made{named} and does not fit {base}, "
        f"which {base_option} names ({len(problems)} differences)\n  {told}"
    )


def check_name(adapter: AdapterFolder, base_option: str, base: str | None) -> None:
    """Raise ValueError where an adapter says that its base has another name: two models may have the same shapes.

    A base of None is drawn at random.
    """
    if adapter.base is None or (base is not None and is_same_base(adapter.base, base)):
        return
    same = "" if base is None else f"; if both are the same weights, write {base} into that file"
    raise ValueError(
        f"{adapter.option}: {adapter.folder / CONFIG_FILE} says base_model_name_or_path: {adapter.base}, and "
        f"{base_option} is {base or 'null, so that the base is random'}. Set {base_option} to the adapter's base{same}"
    )


def is_same_base(one: str, other: str) -> bool:
    """Whether two names may mean the same weights: ids, or folders that may have been copied or moved.

    Two folders that are both here must be one. Of a folder that is not here, and of an id, the last part of the name is
    what a copy keeps.
    """
    first, second = Path(one).expanduser(), Path(other).expanduser()
    if first.is_dir() and second.is_dir():
        return first.samefile(second)
    return _own_name(first) == _own_name(second)


def _own_name(path: Path) -> str:
    """The last part of a name; of a folder in the Hub's cache, models--ORG--NAME/snapshots/COMMIT, that of its id."""
    return path.parent.parent.name.rpartition("--")[2] if path.parent.name == "snapshots" else path.name
