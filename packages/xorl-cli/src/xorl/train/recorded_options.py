"""The options that decide which tensors a checkpoint holds: recorded in it, and compared when a run resumes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from xorl.ckpt import JSON
from xorl.config import Config
from xorl.lora.peft import CONFIG_FILE, AdapterConfig
from xorl.train.adapters.folder import is_adapter
from xorl.train.checkpoint_model import MODEL

# Where a manifest has them.
OPTIONS = "options"
# What adapter_config.json says under names of its own.
_OF_ADAPTERS = {
    "r": "lora.lora_rank",
    "target_modules": "lora.lora_target_modules",
    "use_dora": "lora.use_dora",
    "rank_pattern": "lora.rank_pattern",
    "modules_to_save": "lora.modules_to_save",
}
# How a base is quantised: no tensor tells, where a checkpoint has adapters alone.
_OF_BASES = ("lora.enable_qlora", "lora.quant_format", "lora.quant_group_size", "lora.exclude_modules")


def recorded_options(config: Config) -> dict[str, JSON]:
    """Those that neither the note of the model nor the files of the adapters tell."""
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
    """What the checkpoint in `folder` records otherwise than this run would, as `option: value, now value`.

    `saved` and `now` are what the manifests say (`Manifest.info`), and `adapters` are this run's.
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
    """Raise ValueError where the adapters of a checkpoint without their base would go on over another quantisation.

    `folder`, `saved` and `now` are those of `differing_options`.
    """
    others = [told for told in differing_options(folder, saved, now, None) if told.startswith(_OF_BASES)]
    if others:
        raise ValueError(
            f"train.load_checkpoint_path: {folder} holds adapters that were trained over a base with "
            f"{'; '.join(others)}: set it back, or begin a new run with lora.adapter_path"
        )


def _by_name(info: Mapping[str, JSON], adapter: Mapping[str, JSON] | None) -> dict[str, JSON]:
    model = cast("Mapping[str, JSON]", info.get(MODEL, {}))
    options: dict[str, JSON] = {"lora.enable_lora": adapter is not None}
    if adapter is not None:
        options |= {option: adapter.get(key) for key, option in _OF_ADAPTERS.items()}
    if "merge_qkv" in model:
        options["model.merge_qkv"] = model["merge_qkv"]
    return {**options, **cast("Mapping[str, JSON]", info.get(OPTIONS, {}))}
