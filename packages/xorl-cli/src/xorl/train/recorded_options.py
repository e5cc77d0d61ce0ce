"""The options that determine the tensors of a checkpoint: recorded in it, and compared when a run resumes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from xorl.ckpt.layout import JSON
from xorl.config import Config
from xorl.lora.peft import CONFIG_FILE, AdapterConfig
from xorl.train.adapters.folder import is_adapter
from xorl.train.checkpoint_model import MODEL

# Their key in a manifest's info.
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


def recorded_options(config: Config) -> dict[str, JSON]:
    """The options that neither the model's description nor the adapters' files record."""
    train, lora = config.train, config.lora
    options: dict[str, JSON] = {
        "train.optimizer": train.optimizer,
        "train.optimizer_dtype": train.optimizer_dtype,
        "train.param_dtype": train.param_dtype,
        "lora.enable_qlora": lora.enable_qlora,
    }
    if lora.enable_qlora:
        options |= {
            "lora.quant_format": lora.quant_format,
            "lora.quant_group_size": lora.quant_group_size,
            "lora.exclude_modules": lora.exclude_modules,
        }
    return options


def differing_options(
    folder: Path, saved: Mapping[str, JSON], now: Mapping[str, JSON], adapters: AdapterConfig | None
) -> list[str]:
    """The options of the checkpoint in `folder` that differ from this run's, as `option: value, now value`.

    `saved` is the checkpoint's `Manifest.info`, and `now` that of this run; `adapters` are this run's.
    """
    content = cast("dict[str, JSON]", json.loads((folder / CONFIG_FILE).read_text())) if is_adapter(folder) else None
    before = _by_name(saved, content)
    after = _by_name(now, None if adapters is None else cast("dict[str, JSON]", adapters.to_json()))
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


def _by_name(info: Mapping[str, JSON], adapter: Mapping[str, JSON] | None) -> dict[str, JSON]:
    model = cast("Mapping[str, JSON]", info.get(MODEL, {}))
    options: dict[str, JSON] = {"lora.enable_lora": adapter is not None}
    if adapter is not None:
        options |= {option: adapter.get(key) for key, option in _ADAPTER_OPTIONS.items()}
    if "merge_qkv" in model:
        options["model.merge_qkv"] = model["merge_qkv"]
    return {**options, **cast("Mapping[str, JSON]", info.get(OPTIONS, {}))}
