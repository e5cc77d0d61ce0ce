"""Short runs that train adapters on tiny models: their data and configuration."""

from collections.abc import Mapping
from pathlib import Path

from tiny_runs import run_values, write_counting_rows
from xorl.config import LoadedConfig, config_from_mapping

NUM_STEPS = 4


def write_data(folder: Path) -> None:
    """Write `data.jsonl`."""
    write_counting_rows(folder / "data.jsonl", 32)


def config_of(
    folder: Path, output: Path, lora: Mapping[str, object], base: str = "base", **train: object
) -> LoadedConfig:
    """The configuration of a run over the model `base` in `folder`; `train` has options of that section."""
    rows = [{"path": str(folder / "data.jsonl")}]
    values = run_values(
        folder,
        output,
        model={"model_path": str(folder / base)},
        data={"datasets": rows, "test_datasets": rows},
        lora={"enable_lora": True, **lora},
        **{"max_steps": NUM_STEPS, "lr": 0.02, **train},
    )
    return config_from_mapping(values)
