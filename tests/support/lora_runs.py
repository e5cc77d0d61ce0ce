"""Short runs that train adapters on tiny models: their data and configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from xorl.config import LoadedConfig, config_from_mapping

NUM_STEPS = 4


def write_data(folder: Path) -> None:
    """Write `data.jsonl`, with sequences that a model learns in a few steps."""
    with (folder / "data.jsonl").open("w") as file:
        for index in range(32):
            file.write(json.dumps({"input_ids": [(index + offset) % 50 for offset in range(6 + index % 7)]}) + "\n")


def config_of(
    folder: Path,
    output: Path,
    lora: Mapping[str, object],
    max_steps: object = NUM_STEPS,
    base: str = "base",
    **options: object,
) -> LoadedConfig:
    """The configuration of a run over the model `base` in `folder`; `options` are those of section train."""
    data = str(folder / "data.jsonl")
    return config_from_mapping(
        {
            "model": {"model_path": str(folder / base)},
            "data": {
                "datasets": [{"path": data}],
                "test_datasets": [{"path": data}],
                "dataset_prepared_path": str(folder / "prepared"),
                "sample_packing_sequence_len": 64,
                "dataloader_num_workers": 0,
                "pad_to_multiple_of": 8,
            },
            "train": {
                "output_dir": str(output),
                "max_steps": max_steps,
                "lr": 0.02,
                "enable_mixed_precision": False,
                "log_format": "structured",
                "use_wandb": False,
                **options,
            },
            "lora": {"enable_lora": True, **lora},
        }
    )
