"""The model in a checkpoint: its recorded description and options, and its weights for new runs and exports."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from xorl.ckpt import CheckpointError, WeightRecipe, WeightSource, read_manifest
from xorl.ckpt.layout import JSON, Manifest, is_complete, latest_checkpoint
from xorl.ckpt.saved_tensors import SavedParameters
from xorl.config import Config
from xorl.config.local import ModelConfig
from xorl.core.models import spec_for
from xorl.core.models.hf_config import is_inert
from xorl.kernels.quant import QuantFormat, QuantizedWeight, QuantScheme
from xorl.lora.peft import CONFIG_FILE, AdapterConfig
from xorl.lora.peft.config import recorded_settings
from xorl.lora.prequantized import QUANTIZATION_KEY
from xorl.train.adapters.folder import is_adapter, is_same_base
from xorl.train.adapters.inject import SHARING_OPTIONS
from xorl.train.architecture import Architecture, EncoderParts, read_generation
from xorl.train.base_weights import base_fingerprint, differing_weights

logger = logging.getLogger(__name__)

# The model's key in the state of a checkpoint (see Engine.state) and in its manifest's info.
MODEL = "model"
# The key of `recorded_options` in a manifest's info.
OPTIONS = "options"
# Keys of adapter_config.json and the options they come from.
_ADAPTER_OPTIONS = {
    "r": "lora.lora_rank",
    "target_modules": "lora.lora_target_modules",
    "use_dora": "lora.use_dora",
    "rank_pattern": "lora.rank_pattern",
    "modules_to_save": "lora.modules_to_save",
}
# The quantisation of the base, which the tensors of a checkpoint with adapters alone do not show.
_BASE_OPTIONS = ("lora.enable_qlora", "lora.quant_format", "lora.quant_group_size", "lora.exclude_modules")
# What is trained. Tensors of optimizers without state do not show it.
_PART_OPTIONS = ("train.freeze_router", "train.freeze_encoders", "train.freeze_projectors", "train.freeze_decoder")
# How many differences a message lists.
_MAX_LISTED = 5


@dataclass(frozen=True)
class ModelDescription:
    """A checkpoint's description of its model: see `describe_model`.

    Attributes:
        architecture: without adapters or quantisation.
        merge_qkv: whether projections are merged.
        base_path: the folder or Hub id that training started from; None for random weights.
        base_fingerprint: of the weights there, if adapters were trained over them and it was recorded.
        scheme: of quantised base weights; None if they are not quantised.
    """

    architecture: Architecture
    merge_qkv: bool
    base_path: str | None
    base_fingerprint: str | None
    scheme: QuantScheme | None

    def weights_in(self, folder: Path) -> SavedParameters | None:
        """The weights in the checkpoint, under the names of transformers; None if it does not hold all of them."""
        recipes = self.architecture.recipes(merge_qkv=self.merge_qkv)
        if not SavedParameters.holds(folder, MODEL, recipes):
            return None
        dense = None if self.scheme is None else partial(_dequantized, self.scheme, recipes)
        return SavedParameters(folder, MODEL, recipes, dense)


def describe_model(
    model: ModelConfig, architecture: Architecture, scheme: QuantScheme | None, base_fingerprint: str | None
) -> dict[str, JSON]:
    """The description of a model in its checkpoints, so that these can be exported without the run's configuration.

    `scheme` is None unless the base weights are quantised. `base_fingerprint` is None for a model without adapters.
    """
    tokenizer = architecture.tokenizer_folder
    return {
        "path": model.model_path,
        "base_fingerprint": base_fingerprint,
        "hf_config": cast(Mapping[str, JSON], architecture.hf_config),
        "merge_qkv": model.merge_qkv,
        "tokenizer": None if tokenizer is None else str(tokenizer.absolute()),
        "chat_template": architecture.chat_template,
        "generation": cast(Mapping[str, JSON], architecture.generation),
        "own_tokenizer": architecture.own_tokenizer,
        "own_generation": architecture.own_generation,
        "origin": architecture.origin,
        "encoder": None if architecture.encoder is None else cast("dict[str, JSON]", asdict(architecture.encoder)),
        "quantization": None if scheme is None else cast("dict[str, JSON]", asdict(scheme)),
    }


def find_checkpoint(given: Path) -> Path | None:
    """The checkpoint in this folder, or the newest of the run in it."""
    if is_complete(given):
        return given.absolute()
    newest = (latest_checkpoint(root) for root in (given, given / "checkpoints"))
    return next((found.absolute() for found in newest if found is not None), None)


@dataclass(frozen=True)
class StartingCheckpoint:
    """A checkpoint with a whole model that another run starts from; `option` is for error messages."""

    option: str
    folder: Path
    step: int
    description: ModelDescription

    def require_model(self, architecture: Architecture, described_by: str) -> None:
        """Raise ValueError with the differences if this is the checkpoint of another model."""
        _require_same(self.option, self.folder, self.description.architecture, architecture, described_by)

    def weights(self) -> WeightSource:
        """The weights under the names of transformers. Collective, since the ranks share the hashing of the files.

        Raises CheckpointError on every rank if the checkpoint is damaged.
        """
        weights = self.description.weights_in(self.folder)
        assert weights is not None, "checked when it was opened"
        try:
            weights.verify()
        except CheckpointError as error:
            raise CheckpointError(f"{self.option}: {error}") from error
        logger.debug("weights_from=%s step=%d", self.folder, self.step)
        return weights


def open_start(option: str, path: str, *, for_adapters: str) -> StartingCheckpoint:
    """The checkpoint at `path`, or the newest in a run's folder. Not collective.

    Raises ValueError, beginning with `option`, if there is none or it lacks a whole model; `for_adapters` is the advice
    for the checkpoint of an adapter.
    """
    given = Path(path).expanduser()
    folder = find_checkpoint(given)
    if folder is None:
        reason = "it is not a local folder"
        if given.is_dir():
            reason = "it has no metadata.json, and no checkpoint below it"
        if (given / "config.json").is_file():
            reason = "it is a Hugging Face folder, which other values of load_weights_mode read"
        raise ValueError(f"{option}: {path} is neither an xorl checkpoint nor the folder of a run with one: {reason}")
    try:
        manifest = read_manifest(folder)
        description = read_description(folder, manifest)
    except ValueError as error:
        raise type(error)(f"{option}: {error}") from error
    if is_adapter(folder) or "sweep" in manifest.info:
        raise ValueError(f"{option}: {folder} holds an adapter, not a whole model: {for_adapters}")
    if description.weights_in(folder) is None:
        raise ValueError(f"{option}: {folder} does not hold all weights of its model")
    return StartingCheckpoint(option, folder, manifest.step, description)


def require_resumable(folder: Path, manifest: Manifest, model: ModelConfig, architecture: Architecture) -> None:
    """Raise ValueError if a run would resume from the checkpoint of another model, or over another base.

    This compares the properties that the names and shapes of parameters, which are checked on loading, do not show.
    """
    if MODEL not in manifest.info:
        return  # saved by other code, which recorded no model
    description, option = read_description(folder, manifest), "train.load_checkpoint_path"
    _require_same(option, folder, description.architecture, architecture, "the section model")
    if description.weights_in(folder) is not None:
        return
    saved, base = description.base_path, model.model_path
    recorded = description.base_fingerprint
    if recorded is not None and base is not None:
        found = base_fingerprint("model.model_path", base)
        if found != recorded:
            raise ValueError(
                f"{option}: {folder} does not contain its base and was trained over "
                f"{differing_weights(saved, recorded, f'those in {base}, which model.model_path names,', found)}. "
                "Restore the base, or name a copy of it in model.model_path"
            )
        return
    is_same = saved == base if saved is None or base is None else is_same_base(saved, base)
    if not is_same:
        raise ValueError(
            f"{option}: {folder} was trained over {saved} and does not contain that base, but model.model_path is "
            f"{base}; restore model.model_path, or start a new run with lora.adapter_path"
        )


def _require_same(option: str, folder: Path, saved: Architecture, expected: Architecture, described_by: str) -> None:
    problems = list(dict.fromkeys(_differences("", asdict(saved.config), asdict(expected.config))))
    if problems:
        # Users know the keys of config.json, not what becomes of them.
        keys = [key for key in {**saved.hf_config, **expected.hf_config} if not is_inert(key)]
        before, now = ({key: each.hf_config.get(key) for key in keys} for each in (saved, expected))
        problems = [*_differences("", before, now)] or problems
    if saved.spec.architecture != expected.spec.architecture:
        problems.insert(0, f"it is a {saved.spec.architecture}, not a {expected.spec.architecture}")
    if problems:
        more = [f"... and {len(problems) - _MAX_LISTED} more"] * (len(problems) > _MAX_LISTED)
        raise ValueError(
            f"{option}: {folder} is of another model than {described_by} describes\n  "
            + "\n  ".join([*problems[:_MAX_LISTED], *more])
            + f"\nChoose another checkpoint, or change {described_by} so that it describes the model of this one."
        )


def _differences(path: str, before: object, now: object) -> Iterator[str]:
    """The entries that differ; fields of layers are named without the number of the layer."""
    if isinstance(before, Mapping) and isinstance(now, Mapping) and before.keys() == now.keys():
        for name, value in before.items():
            yield from _differences(f"{path}.{name}" if path else name, value, now[name])
    elif isinstance(before, tuple) and isinstance(now, tuple) and len(before) == len(now):
        for old, new in zip(before, now, strict=True):
            yield from _differences(path, old, new)
    elif before != now:
        yield f"{path}: {before}, not {now}"


def read_description(folder: Path, manifest: Manifest) -> ModelDescription:
    """Read the description that `describe_model` recorded. Raises ValueError if there is none."""
    recorded = cast("Mapping[str, JSON] | None", manifest.info.get(MODEL))
    if recorded is None:
        raise ValueError(
            f"{folder} has no description of its model: it was saved by an older xorl or by other code; export it with "
            "that code as a Hugging Face folder"
        )
    hf_config = {
        key: value
        for key, value in cast(Mapping[str, object], recorded["hf_config"]).items()
        if key != QUANTIZATION_KEY  # exported weights are not quantised
    }
    spec = spec_for(hf_config)
    tokenizer = None if recorded["tokenizer"] is None else Path(str(recorded["tokenizer"]))
    if tokenizer is not None and not tokenizer.is_dir():
        logger.warning("tokenizer=%s, recorded in the checkpoint, no longer exists", tokenizer)
        tokenizer = None
    template = cast("str | None", recorded.get("chat_template"))
    generation = cast("Mapping[str, object] | None", recorded.get("generation"))
    if generation is None:  # recorded by an older xorl
        generation = {} if tokenizer is None else read_generation(str(folder), tokenizer)
    own = recorded.get("own_tokenizer")
    if own is None:  # recorded by an older xorl
        own = tokenizer is not None and not is_same_base(str(tokenizer), str(recorded["path"]))
    architecture = Architecture(
        spec,
        spec.config_from_hf(hf_config),
        hf_config,
        tokenizer,
        template,
        generation,
        bool(own),
        bool(recorded.get("own_generation")),
        cast("str | None", recorded.get("origin")),
        encoder=_encoder_of(recorded),
    )
    stored = cast("Mapping[str, JSON] | None", recorded.get("quantization"))
    scheme = None
    if stored is not None:
        scheme = QuantScheme(cast(QuantFormat, stored["quant_format"]), cast(int, stored["group_size"]))
    path, fingerprint = (cast("str | None", recorded.get(key)) for key in ("path", "base_fingerprint"))
    return ModelDescription(architecture, bool(recorded["merge_qkv"]), path, fingerprint, scheme)


def _encoder_of(recorded: Mapping[str, JSON]) -> EncoderParts | None:
    encoder = cast("Mapping[str, JSON] | None", recorded.get("encoder"))
    if encoder is None:
        return None
    processor = cast("Mapping[str, object]", encoder["processor"])
    return EncoderParts(cast("str | None", encoder["origin"]), processor, str(encoder["token"]))


def recorded_options(config: Config) -> dict[str, JSON]:
    """The options that neither the model's description nor the adapters' files record."""
    train = config.train
    return {
        "train.optimizer": train.optimizer,
        "train.optimizer_dtype": train.optimizer_dtype,
        "train.param_dtype": train.param_dtype,
        "train.freeze_router": train.freeze_router,
        "train.freeze_encoders": train.freeze_encoders,
        "train.freeze_projectors": train.freeze_projectors,
        "train.freeze_decoder": train.freeze_decoder,
        "train.loss": train.loss,
        "train.preference_reference": train.preference_reference,
        **base_options(config),
    }


def base_options(config: Config) -> dict[str, JSON]:
    """The options that change the values of the base that adapters are trained over."""
    names = _BASE_OPTIONS if config.lora.enable_qlora else _BASE_OPTIONS[:1]
    return {name: getattr(config.lora, name.removeprefix("lora.")) for name in names}


def differing_options(
    folder: Path, saved: Mapping[str, JSON], now: Mapping[str, JSON], adapters: AdapterConfig | None
) -> list[str]:
    """The options of the checkpoint in `folder` that differ from this run's, as `option: value, now value`.

    `saved` is the checkpoint's `Manifest.info`, and `now` that of this run; `adapters` are this run's.
    """
    content = cast("dict[str, JSON]", json.loads((folder / CONFIG_FILE).read_text())) if is_adapter(folder) else None
    before = _options_by_name(saved, content)
    after = _options_by_name(now, None if adapters is None else cast("dict[str, JSON]", adapters.to_json()))
    return [
        f"{option}: {json.dumps(value)}, now {json.dumps(after[option])}"
        for option, value in before.items()
        if option in after and after[option] != value
    ]


def require_same_base(folder: Path, saved: Mapping[str, JSON], now: Mapping[str, JSON]) -> None:
    """Raise ValueError if adapters from a checkpoint without a base were trained over another quantisation.

    The arguments are those of `differing_options`.
    """
    differing = [text for text in differing_options(folder, saved, now, None) if text.startswith(_BASE_OPTIONS)]
    if differing:
        raise ValueError(
            f"train.load_checkpoint_path: {folder} holds adapters that were trained over a base with "
            f"{'; '.join(differing)}: restore the option, or start a new run with lora.adapter_path"
        )


def require_same_parts(folder: Path, saved: Mapping[str, JSON], now: Mapping[str, JSON]) -> None:
    """Raise CheckpointError if the run of a checkpoint trained other parts of the model.

    The arguments are those of `differing_options`.
    """
    differing = [text for text in differing_options(folder, saved, now, None) if text.startswith(_PART_OPTIONS)]
    if differing:
        raise CheckpointError(
            f"train.load_checkpoint_path: {folder} was saved with {'; '.join(differing)}: restore the option, or start "
            "a new run from its weights"
        )


def _options_by_name(info: Mapping[str, JSON], adapter: Mapping[str, JSON] | None) -> dict[str, JSON]:
    model = cast("Mapping[str, JSON]", info.get(MODEL, {}))
    options: dict[str, JSON] = {"lora.enable_lora": adapter is not None}
    if adapter is not None:
        config = AdapterConfig.from_json(adapter)
        settings = cast("Mapping[str, JSON]", recorded_settings(adapter))
        options |= {option: settings.get(key) for key, option in _ADAPTER_OPTIONS.items()}
        options |= {f"lora.{option}": config.spec.expert_sharing == one for one, option in SHARING_OPTIONS.items()}
    if "merge_qkv" in model:
        options["model.merge_qkv"] = model["merge_qkv"]
    return {**options, **cast("Mapping[str, JSON]", info.get(OPTIONS, {}))}


def _dequantized(
    scheme: QuantScheme, recipes: Mapping[str, WeightRecipe], name: str, read: Callable[[str], Tensor | None]
) -> Tensor | None:
    """A parameter of a run with quantised base weights; quantised ones are dequantised to fp32."""
    saved = read(name)
    path = name.removesuffix(".weight")
    scales = read(f"{path}.weight_scale")
    if saved is None or scales is None:
        return saved
    weight = QuantizedWeight(saved, scales, read(f"{path}.weight_global_scale"))
    return scheme.dequantize(weight, recipes[name].shape[0], torch.float32)
