"""Reads an adapter in PEFT's format from a folder, and checks that it fits a base model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from xorl.ckpt import CheckpointError, CheckpointFailure, SafetensorsSource, WeightRecipe, load_weights, resolve_folder
from xorl.ckpt.layout import is_complete, verify
from xorl.core.models import Decoder
from xorl.core.models.recipes import WeightSource
from xorl.core.models.stacks import ExpertNames
from xorl.lora import adapters
from xorl.lora.inject import base_parameters
from xorl.lora.peft import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterConfig,
    differences,
    load_adapters,
    per_expert,
    read_layout,
)
from xorl.lora.peft.layout import AdapterLayout, ReplacedTensors

# In the header of the file with an adapter's tensors: the fingerprint of the base weights that it was trained over.
BASE_FINGERPRINT = "base_fingerprint"
# How many differences a message lists.
_MAX_LISTED = 5


@dataclass(frozen=True)
class AdapterFolder:
    """A complete adapter that was read from a folder; `option` is for error messages.

    `layout` and `source` are as in the form per_expert, whatever that of the file is; `stored` are its own tensors.
    `base_fingerprint` is that of the base weights it was trained over, if its file records it.
    """

    option: str
    folder: Path
    layout: AdapterLayout
    source: WeightSource
    stored: WeightSource
    base_fingerprint: str | None

    @property
    def base(self) -> str | None:
        """The base model named in its configuration."""
        return self.layout.config.base


def is_adapter(folder: Path) -> bool:
    """Whether this folder holds an adapter."""
    return (folder / CONFIG_FILE).is_file()


def open_adapter(option: str, path: str, experts: ExpertNames | None = None) -> AdapterFolder:
    """Open the adapter in a folder or a Hub repository. Not collective: every rank reads it.

    `experts` are the names of experts in the base's checkpoint, which PEFT's form does not have. The hashes of an xorl
    checkpoint are checked. Raises ValueError, which begins with `option` and names the file, if there is no adapter, or
    it is incomplete or of an unsupported kind; CheckpointFailure if the Hub cannot be reached.
    """
    try:
        folder = resolve_folder(path, patterns=(CONFIG_FILE, WEIGHTS_FILE))
        file = folder / CONFIG_FILE
        if not file.is_file():
            raise CheckpointError(f"{folder} holds no adapter: it has no {CONFIG_FILE}")
        if is_complete(folder):
            verify(folder, names=(CONFIG_FILE, WEIGHTS_FILE))
        source = SafetensorsSource(folder, single_file=WEIGHTS_FILE)
    except (CheckpointError, CheckpointFailure) as error:
        raise type(error)(f"{option}: {error}") from error
    config = read_adapter_config(option, folder)
    try:
        config, tensors = per_expert(config, source, experts)
        layout = read_layout(config, tensors)
    except ValueError as error:
        raise ValueError(f"{option}: {folder / WEIGHTS_FILE}: {error}") from error
    return AdapterFolder(option, folder, layout, tensors, source, source.metadata.get(BASE_FINGERPRINT))


def read_adapter_config(option: str, folder: Path) -> AdapterConfig:
    """The configuration of the adapter in a folder.

    Raises ValueError, which begins with `option` and names the file, if it is not valid.
    """
    file = folder / CONFIG_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not a mapping")
        return AdapterConfig.from_json(content)
    except ValueError as error:
        raise ValueError(f"{option}: {file}: {error}") from error


def load_adapter(module: nn.Module, adapter: AdapterFolder, recipes: Mapping[str, WeightRecipe]) -> None:
    """Load the values of adapters into a model, whole or sharded, that has adapters of its spec. Collective.

    The base must be loaded before: tensors of the base in the adapter's file replace its weights. A stage of a pipeline
    loads those of its own layers.
    """
    replaced = ReplacedTensors(adapter.layout, adapter.source)
    names = set(replaced.names())
    replaced_recipes = {name: recipe for name, recipe in recipes.items() if names.issuperset(recipe.sources)}
    if names:
        parameters = base_parameters(module)
        held = {name: parameters[name] for name in replaced_recipes if name in parameters}
        load_weights(held, replaced_recipes, replaced, mode="all_ranks")
    layout = adapter.layout
    if isinstance(module, Decoder) and not module.stage.is_whole:
        own = {name for each in adapters(module).values() for name in each.members}
        layout = replace(layout, modules={name: one for name, one in layout.modules.items() if name in own})
    load_adapters(module, layout, adapter.source, base_loaded=True)


def check_shapes(adapter: AdapterFolder, base: str, shapes: Mapping[str, Sequence[int]], *, tied: bool) -> None:
    """Raise ValueError, with the differences, unless an adapter fits a base model with tensors of these shapes.

    `base` describes the model in the message. `tied`: its head uses the weight of its embedding.
    """
    problems = differences(adapter.layout, shapes, tied=tied)
    if not problems:
        return
    made_for = f", made for {adapter.base}," if adapter.base else ""
    more = [f"... and {len(problems) - _MAX_LISTED} more"] * (len(problems) > _MAX_LISTED)
    raise ValueError(
        f"{adapter.option}: the adapter in {adapter.folder / WEIGHTS_FILE}{made_for} does not fit {base} "
        f"({len(problems)} differences)\n  " + "\n  ".join([*problems[:_MAX_LISTED], *more])
    )


def check_name(adapter: AdapterFolder, base_option: str, base: str | None) -> None:
    """Raise ValueError if an adapter names another base: different models may have the same shapes.

    A base of None has random weights. An adapter that records the fingerprint of its base may name any folder.
    """
    if adapter.base_fingerprint is not None and base is not None:
        return
    if adapter.base is None or (base is not None and is_same_base(adapter.base, base)):
        return
    same = "" if base is None else f"; if both are the same weights, write {base} into that file"
    raise ValueError(
        f"{adapter.option}: {adapter.folder / CONFIG_FILE} says base_model_name_or_path: {adapter.base}, and "
        f"{base_option} is {base or 'null, so that the base is random'}. Set {base_option} to the adapter's base{same}"
    )


def is_same_base(one: str, other: str) -> bool:
    """Whether two names, each a Hub id or a folder that may have been copied or moved, can mean the same weights.

    Two existing folders must be the same folder. Otherwise the last parts of the names are compared, which a copy
    keeps.
    """
    first, second = Path(one).expanduser(), Path(other).expanduser()
    if first.is_dir() and second.is_dir():
        return first.samefile(second)
    return _model_name(first) == _model_name(second)


def _model_name(path: Path) -> str:
    """The last part of a path; for a folder in the Hub's cache, models--ORG--NAME/snapshots/COMMIT, it is NAME."""
    return path.parent.parent.name.rpartition("--")[2] if path.parent.name == "snapshots" else path.name
