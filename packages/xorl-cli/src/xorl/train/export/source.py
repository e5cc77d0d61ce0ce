"""Opens saved models, to export them or to compute with them: checkpoints, adapters on their base, and exports."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from xorl.ckpt import CheckpointError, SafetensorsSource, WeightSource, read_manifest, resolve_folder
from xorl.ckpt.export import GENERATION_FILE, TEMPLATE_FILE, TOKENIZER_FILES
from xorl.ckpt.layout import is_complete
from xorl.kernels.quant import QuantScheme
from xorl.lora.peft import CONFIG_FILE, WEIGHTS_FILE, MergedWeights
from xorl.lora.prequantized import QUANTIZATION_KEY
from xorl.train.adapters.folder import AdapterFolder, check_shapes, is_adapter, open_adapter, read_adapter_config
from xorl.train.architecture import CONFIG_PATTERNS, Architecture, folder_of, read_config, read_generation
from xorl.train.base_weights import base_fingerprint, differing_weights
from xorl.train.checkpoint_model import find_checkpoint, read_description
from xorl.train.quantization import dense_source

logger = logging.getLogger(__name__)

_TOKENIZER_CONFIG = "tokenizer_config.json"
# The files of which a tokenizer needs one set beside its configuration.
_VOCABULARIES = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("spiece.model",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
)


@dataclass(frozen=True)
class SavedModel:
    """A saved model.

    Attributes:
        folder: the checkpoint or the adapter.
        architecture: of the model without adapters.
        base: the weights without the adapter, named as in transformers.
        base_path: the folder or Hub id of the base weights; None if only the checkpoint has them.
        adapter: the adapter on the base, if any.
        step: the optimizer step of a checkpoint.
        scheme: how the base was quantised while the adapter was trained; None if it was not.
    """

    folder: Path
    architecture: Architecture
    base: WeightSource
    base_path: str | None
    adapter: AdapterFolder | None
    step: int | None
    scheme: QuantScheme | None

    @property
    def weights(self) -> WeightSource:
        """The weights with the adapter, if any, merged into them in fp32."""
        if self.adapter is None:
            return self.base
        return MergedWeights.of_file(self.base, self.adapter.layout, self.adapter.source)


def open_model(path: str, base: str | None = None) -> SavedModel:
    """Open what `open_saved` opens, to compute with it, or a model in Hugging Face format: a folder or Hub id.

    `base` overrides the base model of an adapter. Raises as `open_saved` does.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        folder = folder_of("PATH", path, CONFIG_PATTERNS)
    if is_adapter(folder) or find_checkpoint(folder) is not None:
        return open_saved(path, base, merge=True)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"PATH: {path} is not a model (config.json), an adapter ({CONFIG_FILE}), a checkpoint, or the folder of a "
            "run with checkpoints"
        )
    if base is not None:
        raise ValueError(f"--base: {path} is a whole model, not an adapter; remove --base")
    architecture = read_config("PATH", folder / "config.json", folder.absolute())
    return SavedModel(folder.absolute(), architecture, weights_at("PATH", path, architecture), path, None, None, None)


def open_saved(path: str, base: str | None = None, *, merge: bool = False) -> SavedModel:
    """Open a checkpoint (or the newest one of a run's folder) or an adapter, and its base.

    `base` overrides the base model of an adapter. It never replaces weights that a checkpoint contains, since those
    were trained; for an adapter that is exported without `merge`, it only changes the recorded name of the base.
    Raises ValueError if something is missing or damaged, if the adapter does not fit its base, or if `base` would
    replace trained weights.
    """
    folder = _resolve(path)
    manifest = read_manifest(folder) if is_complete(folder) else None
    if manifest is not None and "sweep" in manifest.info:
        members = sorted(path.name for path in (folder / "adapters").iterdir())
        raise ValueError(
            f"PATH: {folder} is a checkpoint of a sweep, which has several adapters; name one of them, such as "
            f"{folder / 'adapters' / members[0]} (members: {', '.join(members)})"
        )
    step = None if manifest is None else manifest.step
    description = None if manifest is None else read_description(folder, manifest)
    scheme = None if description is None else description.scheme
    adapter = None
    if description is not None and is_adapter(folder):
        adapter = open_adapter("PATH", str(folder), description.architecture.spec.checkpoint_names.experts)
    trained = None if description is None else description.weights_in(folder)
    if description is not None and trained is not None:
        changed_its_base = adapter is not None and adapter.base != description.base_path
        if base is not None:
            if adapter is None or merge or changed_its_base:
                raise ValueError(f"--base: {folder} contains all weights of its model; remove --base to export them")
            named = weights_at("--base", base, description.architecture)
            _check_fits(adapter, f"{base}, which --base names", named, description.architecture)
            adapter = _over(base, adapter, is_given=True)
        trained.verify()
        base = None if changed_its_base else base or description.base_path
        return SavedModel(folder, description.architecture, trained, base, adapter, step, scheme)
    if not is_adapter(folder):
        raise ValueError(f"PATH: {folder} contains neither all weights of its model nor an adapter")
    is_given = base is not None
    shown = "its base" if base is None else f"{base}, which --base names"
    base = base or (None if description is None else description.base_path) or read_adapter_config("PATH", folder).base
    if base is None:
        raise ValueError(f"--base: {folder} does not name its base model; give its folder or Hub id")
    base_folder = folder_of("--base", base, CONFIG_PATTERNS)
    architecture = read_config("--base", base_folder / "config.json", base_folder)
    trained = _with_files_in(folder, architecture if description is None else description.architecture)
    architecture = replace(
        architecture,
        tokenizer_folder=trained.tokenizer_folder if trained.own_tokenizer else base_folder,
        chat_template=trained.chat_template,
        generation=trained.generation,
        own_tokenizer=trained.own_tokenizer,
        own_generation=trained.own_generation,
        origin=base,
    )
    weights = weights_at("--base", base, architecture)
    # Exported weights are not quantised.
    dense_config = {key: value for key, value in architecture.hf_config.items() if key != QUANTIZATION_KEY}
    architecture = replace(architecture, hf_config=dense_config)
    adapter = open_adapter("PATH", str(folder), architecture.spec.checkpoint_names.experts)
    _check_fits(adapter, shown, weights, architecture)
    adapter = _over(base, adapter, is_given=is_given)
    return SavedModel(folder, architecture, weights, base, adapter, step, scheme)


def _over(base: str, adapter: AdapterFolder, *, is_given: bool) -> AdapterFolder:
    """The adapter with the fingerprint of the weights in `base`, if it records one.

    Raises ValueError if they are others than the adapter's own, unless --base named them.
    """
    if adapter.base_fingerprint is None:
        return adapter
    found = base_fingerprint("--base", base)
    if found != adapter.base_fingerprint:
        now = f"those in {base}"
        differing = differing_weights(adapter.base, adapter.base_fingerprint, now, found)
        if not is_given:
            raise ValueError(
                f"PATH: the adapter in {adapter.folder} was trained over {differing}. Restore the base, or name with "
                "--base the weights to use instead, the same folder too"
            )
        logger.warning("--base: the adapter in %s was trained over %s", adapter.folder, differing)
    return replace(adapter, base_fingerprint=found)


def _with_files_in(folder: Path, architecture: Architecture) -> Architecture:
    """`architecture` with the tokenizer or template and the generation_config.json beside an adapter in `folder`.

    A tokenizer that lacks files is not used, since transformers would read another one from the rest.
    """
    if (folder / GENERATION_FILE).is_file():
        architecture = replace(architecture, generation=read_generation("PATH", folder), own_generation=True)
    has_config = (folder / _TOKENIZER_CONFIG).is_file()
    has_vocabulary = any(all((folder / name).is_file() for name in names) for names in _VOCABULARIES)
    if has_config and has_vocabulary:
        return replace(architecture, tokenizer_folder=folder, own_tokenizer=True)
    if has_config or has_vocabulary:
        lacking = "a vocabulary, such as tokenizer.json" if has_config else _TOKENIZER_CONFIG
        logger.warning("tokenizer=the base's: the tokenizer beside the adapter in %s lacks %s", folder, lacking)
    if (file := folder / TEMPLATE_FILE).is_file():
        return replace(architecture, chat_template=file.read_text(encoding="utf-8"))
    return architecture


def weights_at(option: str, path: str, architecture: Architecture) -> WeightSource:
    """The weights in the folder or Hub repository `path`, given as `option`, named as in the model's recipes.

    Quantised weights are dequantised.
    """
    try:
        folder = resolve_folder(path)
        source = SafetensorsSource(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{option}: {error}") from error
    view = architecture.spec.checkpoint_view(architecture.config, source)
    described = read_config(option, folder / "config.json", folder)
    try:
        return dense_source(view, described, torch.bfloat16)
    except ValueError as error:
        raise ValueError(f"{option}: the model's config.json has {error}") from error


def _check_fits(adapter: AdapterFolder, shown: str, weights: WeightSource, architecture: Architecture) -> None:
    shapes = {name: weights.shape(name) for name in weights.names()}
    check_shapes(adapter, shown, shapes, tied=architecture.config.tie_word_embeddings)


def _resolve(path: str) -> Path:
    """The folder of the checkpoint or adapter at `path`: itself, a run's newest checkpoint, or a Hub download."""
    given = Path(path).expanduser()
    if not given.is_dir():
        try:
            return resolve_folder(path, patterns=(CONFIG_FILE, WEIGHTS_FILE, *TOKENIZER_FILES))
        except CheckpointError as error:
            raise CheckpointError(f"PATH: {error}") from error
    if is_adapter(given):
        return given.absolute()
    if (checkpoint := find_checkpoint(given)) is not None:
        return checkpoint
    hint = "; it is already an exported model" if (given / "config.json").is_file() else ""
    if (given / "service").is_dir():
        hint = "; it is a service's output_dir: give one of its checkpoints, such as weights/MODEL/NAME in it"
    raise ValueError(
        f"PATH: {path} is not a checkpoint, an adapter ({CONFIG_FILE}) or a run's folder with checkpoints{hint}"
    )
