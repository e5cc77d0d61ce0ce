"""A model that was saved and is to be exported: a run's checkpoint or an adapter, and the base that belongs to it."""

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
    SafetensorsSource,
    SavedParameters,
    WeightRecipe,
    WeightSource,
    is_complete,
    latest_checkpoint,
    read_manifest,
    resolve_folder,
    verify,
)
from xorl.config import ModelConfig
from xorl.core.models import spec_for
from xorl.kernels.quant import QuantFormat, QuantizedWeight, QuantScheme
from xorl.lora import QUANTIZATION_KEY
from xorl.lora.peft import CONFIG_FILE, WEIGHTS_FILE
from xorl.train.adapter_folder import AdapterFolder, check_shapes, is_adapter, open_adapter
from xorl.train.model import Architecture, architecture_at

logger = logging.getLogger(__name__)

# The model's name in the state of a checkpoint (see Engine.state), and in what is noted beside it.
MODEL = "model"


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
        "quantization": None if scheme is None else cast("dict[str, JSON]", asdict(scheme)),
    }


def open_saved(path: str, base: str | None = None) -> SavedModel:
    """Find a checkpoint (or the newest of a run's folder) or an adapter, and its base; `base` names another one.

    Raises ValueError that says what is missing or damaged, or why an adapter does not fit its base.
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
    described = None if manifest is None else _described(folder, manifest)
    scheme = None if described is None else described[3]
    if base is None and described is not None:
        architecture, merge_qkv, base_path, _ = described
        recipes = architecture.recipes(merge_qkv=merge_qkv)
        if SavedParameters.holds(folder, MODEL, recipes):
            verify(folder)
            dense = None if scheme is None else partial(_dequantized, scheme, recipes)
            weights = SavedParameters(folder, MODEL, recipes, dense)
            if adapter is not None and adapter.base != base_path:
                base_path = None  # the run changed its base
            return SavedModel(folder, architecture, weights, base_path, adapter, step, scheme)
        base = base_path
    base = base or (None if adapter is None else adapter.base)
    if base is None:
        raise ValueError(f"--base: {folder} does not say what its base model is; name its folder or Hub id")
    architecture = architecture_at("--base", base)
    weights = weights_at("--base", base, architecture)
    if adapter is not None:
        check_shapes(adapter, "--base", base, {name: weights.shape(name) for name in weights.names()})
    return SavedModel(folder, architecture, weights, base, adapter, step, scheme)


def weights_at(option: str, path: str, architecture: Architecture) -> WeightSource:
    """The weights of the model whose folder or Hub id `option` gives, under the names of its recipes."""
    try:
        source = SafetensorsSource(resolve_folder(path))
    except CheckpointError as error:
        raise CheckpointError(f"{option}: {error}") from error
    return architecture.spec.checkpoint_view(architecture.config, source)


def _find(path: str) -> Path:
    """The folder of the checkpoint or the adapter that `path` means."""
    given = Path(path).expanduser()
    if not given.is_dir():
        try:
            return resolve_folder(path, patterns=(CONFIG_FILE, WEIGHTS_FILE))
        except CheckpointError as error:
            raise CheckpointError(f"PATH: {error}") from error
    if is_adapter(given) or is_complete(given):
        return given.absolute()
    for root in (given, given / "checkpoints"):
        latest = latest_checkpoint(root)
        if latest is not None:
            return latest.absolute()
    hint = "; it holds a model that is exported already" if (given / "config.json").is_file() else ""
    raise ValueError(
        f"PATH: {path} is no checkpoint, no adapter ({CONFIG_FILE}) and no run's folder with checkpoints in it{hint}"
    )


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


def _described(folder: Path, manifest: Manifest) -> tuple[Architecture, bool, str | None, QuantScheme | None]:
    """What `describe_model` noted: the model, whether projections are merged, where it began, how it is quantised."""
    noted = cast("Mapping[str, JSON] | None", manifest.info.get(MODEL))
    if noted is None:
        raise ValueError(f"{folder} does not say what its model is: it was saved by an older xorl, or by other code")
    hf_config = {
        key: value
        for key, value in cast(Mapping[str, object], noted["hf_config"]).items()
        if key != QUANTIZATION_KEY  # what is exported is not
    }
    spec = spec_for(hf_config)
    tokenizer = None if noted["tokenizer"] is None else Path(str(noted["tokenizer"]))
    if tokenizer is not None and not tokenizer.is_dir():
        logger.warning("tokenizer=%s is not there any more: the export goes without one", tokenizer)
        tokenizer = None
    architecture = Architecture(spec, spec.config_from_hf(hf_config), hf_config, tokenizer)
    stored = cast("Mapping[str, JSON] | None", noted.get("quantization"))
    scheme = None
    if stored is not None:
        scheme = QuantScheme(cast(QuantFormat, stored["quant_format"]), cast(int, stored["group_size"]))
    return architecture, bool(noted["merge_qkv"]), cast("str | None", noted["path"]), scheme
