"""The model in a checkpoint: what is noted of it, and its weights, for those who start from them or export them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from xorl.ckpt import (
    JSON,
    CheckpointError,
    Manifest,
    SavedParameters,
    WeightRecipe,
    WeightSource,
    is_complete,
    latest_checkpoint,
    read_manifest,
)
from xorl.config import ModelConfig
from xorl.core.models import spec_for
from xorl.kernels.quant import QuantFormat, QuantizedWeight, QuantScheme
from xorl.lora import QUANTIZATION_KEY
from xorl.train.adapters.folder import is_adapter, is_same_base
from xorl.train.architecture import Architecture

logger = logging.getLogger(__name__)

# The model's name in the state of a checkpoint (see Engine.state), and in what is noted beside it.
MODEL = "model"
_SHOWN = 5


@dataclass(frozen=True)
class ModelNote:
    """What a checkpoint says of its model: see `describe_model`.

    Attributes:
        architecture: without adapters, and not quantised.
        merge_qkv: whether projections are merged.
        base_path: the folder or Hub id that it began with, if it did with one.
        scheme: how its base weights are kept quantised, where they are.
    """

    architecture: Architecture
    merge_qkv: bool
    base_path: str | None
    scheme: QuantScheme | None

    def weights_in(self, folder: Path) -> SavedParameters | None:
        """The weights that a checkpoint with this note holds, under the names of transformers; None for not all."""
        recipes = self.architecture.recipes(merge_qkv=self.merge_qkv)
        if not SavedParameters.holds(folder, MODEL, recipes):
            return None
        dense = None if self.scheme is None else partial(_dequantized, self.scheme, recipes)
        return SavedParameters(folder, MODEL, recipes, dense)


def describe_model(model: ModelConfig, architecture: Architecture, scheme: QuantScheme | None) -> dict[str, JSON]:
    """What a checkpoint says of its model, so that it can be exported without the configuration of its run.

    `scheme` is how quantised base weights are kept.
    """
    tokenizer = architecture.tokenizer_folder
    return {
        "path": model.model_path,
        "hf_config": cast(Mapping[str, JSON], architecture.hf_config),
        "merge_qkv": model.merge_qkv,
        "tokenizer": None if tokenizer is None else str(tokenizer.absolute()),
        "chat_template": architecture.chat_template,
        "quantization": None if scheme is None else cast("dict[str, JSON]", asdict(scheme)),
    }


def find_checkpoint(given: Path) -> Path | None:
    """The checkpoint in this folder, or the newest of this run."""
    if is_complete(given):
        return given.absolute()
    newest = (latest_checkpoint(root) for root in (given, given / "checkpoints"))
    return next((found.absolute() for found in newest if found is not None), None)


@dataclass(frozen=True)
class StartingCheckpoint:
    """A checkpoint with a whole model that another run begins with; `option` is how the user named it."""

    option: str
    folder: Path
    step: int
    note: ModelNote

    def require_model(self, architecture: Architecture, described_by: str) -> None:
        """Raise ValueError that says what differs where this is the checkpoint of another model."""
        _require_same(self.option, self.folder, self.note, architecture, described_by)

    def weights(self) -> WeightSource:
        """Its weights under the names of transformers; collective, since the ranks share the work of hashing its files.

        Raises CheckpointError on every rank where it is damaged.
        """
        weights = self.note.weights_in(self.folder)
        assert weights is not None, "checked when it was opened"
        try:
            weights.verify()
        except CheckpointError as error:
            raise CheckpointError(f"{self.option}: {error}") from error
        logger.info("weights_from=%s step=%d", self.folder, self.step)
        return weights


def open_start(option: str, path: str, *, for_adapters: str) -> StartingCheckpoint:
    """The checkpoint that `path` means, or the newest of the run's folder that it means, whose model is whole.

    Not collective: every rank looks. Raises ValueError that begins with `option` where there is none, or not a whole
    model; `for_adapters` says what to do with an adapter.
    """
    given = Path(path).expanduser()
    folder = find_checkpoint(given)
    if folder is None:
        found = "it is no folder here"
        if given.is_dir():
            found = "there is no metadata.json in it, and no checkpoint below it"
        if (given / "config.json").is_file():
            found = "it is a Hugging Face folder, which other values of load_weights_mode read"
        raise ValueError(f"{option}: {path} is no checkpoint of xorl and no run's folder with one: {found}")
    try:
        manifest = read_manifest(folder)
        note = read_note(folder, manifest)
    except ValueError as error:
        raise type(error)(f"{option}: {error}") from error
    if is_adapter(folder) or "sweep" in manifest.info:
        raise ValueError(f"{option}: {folder} holds an adapter, and a whole model is wanted: {for_adapters}")
    if note.weights_in(folder) is None:
        raise ValueError(f"{option}: {folder} does not hold all weights of its model")
    return StartingCheckpoint(option, folder, manifest.step, note)


def require_resumable(folder: Path, manifest: Manifest, model: ModelConfig, architecture: Architecture) -> None:
    """Raise ValueError if a run would resume from the checkpoint of another model, or over another base.

    Names and shapes of parameters are compared when they are loaded; this compares what they do not show.
    """
    if MODEL not in manifest.info:
        return  # saved by other code, which recorded no model
    note, option = read_note(folder, manifest), "train.load_checkpoint_path"
    _require_same(option, folder, note, architecture, "the section model")
    if note.weights_in(folder) is not None:
        return
    saved, base = note.base_path, model.model_path
    is_same = saved == base if saved is None or base is None else is_same_base(saved, base)
    if not is_same:
        raise ValueError(
            f"{option}: {folder} holds what was trained over {saved} without that model itself: set model.model_path "
            f"to it again, now it is {base}, or begin a new run with lora.adapter_path"
        )


def _require_same(option: str, folder: Path, note: ModelNote, architecture: Architecture, described_by: str) -> None:
    own = note.architecture
    saved, wanted = asdict(own.config), asdict(architecture.config)
    problems = [f"{name}: {saved[name]}, not {wanted[name]}" for name in saved if saved[name] != wanted[name]]
    if own.spec.architecture != architecture.spec.architecture:
        problems.insert(0, f"it is a {own.spec.architecture}, not a {architecture.spec.architecture}")
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] * (len(problems) > _SHOWN)
        raise ValueError(
            f"{option}: {folder} is of another model than {described_by} describes\n  "
            + "\n  ".join([*problems[:_SHOWN], *more])
        )


def read_note(folder: Path, manifest: Manifest) -> ModelNote:
    """What `describe_model` noted. Raises ValueError where nothing is."""
    noted = cast("Mapping[str, JSON] | None", manifest.info.get(MODEL))
    if noted is None:
        raise ValueError(
            f"{folder} does not say what its model is: it was saved by an older xorl, or by other code; export it "
            "there, as a Hugging Face folder"
        )
    hf_config = {
        key: value
        for key, value in cast(Mapping[str, object], noted["hf_config"]).items()
        if key != QUANTIZATION_KEY  # what is exported is not
    }
    spec = spec_for(hf_config)
    tokenizer = None if noted["tokenizer"] is None else Path(str(noted["tokenizer"]))
    if tokenizer is not None and not tokenizer.is_dir():
        logger.warning("tokenizer=%s, which the checkpoint names, is not there any more", tokenizer)
        tokenizer = None
    template = cast("str | None", noted.get("chat_template"))
    architecture = Architecture(spec, spec.config_from_hf(hf_config), hf_config, tokenizer, template)
    stored = cast("Mapping[str, JSON] | None", noted.get("quantization"))
    scheme = None
    if stored is not None:
        scheme = QuantScheme(cast(QuantFormat, stored["quant_format"]), cast(int, stored["group_size"]))
    return ModelNote(architecture, bool(noted["merge_qkv"]), cast("str | None", noted["path"]), scheme)


def _dequantized(
    scheme: QuantScheme, recipes: Mapping[str, WeightRecipe], name: str, read: Callable[[str], Tensor | None]
) -> Tensor | None:
    """A parameter of a run with quantised base weights, dequantised to fp32 where it is one."""
    saved = read(name)
    path = name.removesuffix(".weight")
    scales = read(f"{path}.weight_scale")
    if saved is None or scales is None:
        return saved
    weight = QuantizedWeight(saved, scales, read(f"{path}.weight_global_scale"))
    return scheme.dequantize(weight, recipes[name].shape[0], torch.float32)
