"""Reads the architecture of a run's model from the config.json or the checkpoint that the section `model` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from xorl.config.fields import LoadWeightsMode
from xorl.config.local import ModelConfig
from xorl.core.models import spec_for
from xorl.core.models.composite import with_entries
from xorl.core.models.hf_config import DROPOUT_KEYS
from xorl.train.adapters.folder import is_adapter, is_same_base
from xorl.train.architecture import CONFIG_PATTERNS, Architecture, folder_of, read_config, read_generation
from xorl.train.checkpoint_model import StartingCheckpoint, open_start
from xorl.train.compose import composed

# Option names for error messages.
MODEL_PATH = "model.model_path"


def read_architecture(
    config: ModelConfig, load_weights_mode: LoadWeightsMode = "broadcast", adapter_path: str | None = None
) -> Architecture:
    """Read config.json from `model.config_path`, add `model.encoders`, and apply the entries of `model.foundation`.

    With dcp, `model.model_path` is a checkpoint that describes its model, so config.json is optional. `adapter_path` is
    `lora.adapter_path`. Raises ValueError for an unknown model, for a config.json that does not describe the
    checkpoint's model, for entries without effect, and for an adapter beside the weights that is not `adapter_path`.
    """
    start = starting_checkpoint(config) if load_weights_mode == "dcp" else None
    path = config.config_path or (config.model_path if start is None else None)
    if path is None:
        assert start is not None, "the configuration was checked"
        architecture, file = start.description.architecture, start.folder
    else:
        option = "model.config_path" if path != config.model_path else MODEL_PATH
        folder = Path(path).parent if Path(path).is_file() else folder_of(option, path, CONFIG_PATTERNS)
        file = Path(path) if Path(path).is_file() else folder / "config.json"
        nulls = [key for key, value in config.foundation.items() if value is None]
        architecture = read_config(option, file, folder, nulls)
        if start is not None:
            start.require_model(architecture, f"{option} ({file})")
            architecture = replace(architecture, origin=start.description.architecture.origin)
        elif config.model_path is not None:
            base = folder_of(MODEL_PATH, config.model_path, CONFIG_PATTERNS)
            _refuse_unread_adapter(base, config.model_path, adapter_path)
            architecture = replace(
                architecture,
                generation=read_generation(MODEL_PATH, base) or architecture.generation,
                own_tokenizer=(config.tokenizer_path or path) != config.model_path,
                origin=config.model_path,
            )
    if config.tokenizer_path not in (None, path):
        folder = folder_of("model.tokenizer_path", config.tokenizer_path, CONFIG_PATTERNS)
        architecture = replace(architecture, tokenizer_folder=folder)
    if config.encoders:
        architecture = composed(architecture, config)
    return _with_foundation(architecture, config.foundation, file) if config.foundation else architecture


def _refuse_unread_adapter(base: Path, model_path: str, adapter_path: str | None) -> None:
    if is_adapter(base) and (adapter_path is None or not is_same_base(adapter_path, model_path)):
        raise ValueError(
            f"{MODEL_PATH}: {base} holds an adapter beside the weights, which transformers would apply to them: name "
            "the folder in lora.adapter_path to train the adapter on, merge it with `xorl export --merge`, or move its "
            "files away to train the weights alone"
        )


def pin_checkpoint(config: ModelConfig) -> ModelConfig:
    """Replace `model.model_path` by the folder of its newest checkpoint, since that run may write a newer one later."""
    return config.model_copy(update={"model_path": str(starting_checkpoint(config).folder)})


def starting_checkpoint(config: ModelConfig) -> StartingCheckpoint:
    """The checkpoint that `model.model_path` names. Raises ValueError as `open_start` does."""
    assert config.model_path is not None, "the configuration was checked"
    return open_start(
        MODEL_PATH,
        config.model_path,
        for_adapters="export it with `xorl export --merge` and start from that, or name its base here and the adapter "
        "in lora.adapter_path",
    )


def _with_foundation(architecture: Architecture, entries: Mapping[str, object], file: Path) -> Architecture:
    """The architecture with `entries` replacing or extending those of its config.json, which is `file`."""
    hf_config = with_entries(architecture.hf_config, entries)
    dropout = [f"{name}: {entries[name]}" for name in DROPOUT_KEYS if entries.get(name)]
    if dropout:
        raise ValueError(
            f"model.foundation: {', '.join(dropout)}: models train without dropout here; set it to 0, or leave it out"
        )
    try:
        spec = spec_for(hf_config)
        config = spec.config_from_hf(hf_config)
    except ValueError as error:
        raise ValueError(f"model.foundation: {error}") from error
    for name in entries.keys() - architecture.hf_config.keys() - architecture.text_values.keys():
        others = {key: value for key, value in entries.items() if key != name}
        try:
            matters = spec.config_from_hf(with_entries(architecture.hf_config, others)) != config
        except ValueError:
            matters = True  # the configuration is invalid without it
        if not matters:
            raise ValueError(
                f"model.foundation: {name} is not in {file} and has no effect on {spec.architecture}; check the name"
            )
    generation = dict(architecture.generation)
    if generation:  # transformers then reads these from generation_config.json only
        generation |= {key: value for key, value in entries.items() if key in generation or key.endswith("_token_id")}
    own = architecture.own_generation or generation != architecture.generation
    return replace(
        architecture, spec=spec, config=config, hf_config=hf_config, generation=generation, own_generation=own
    )
