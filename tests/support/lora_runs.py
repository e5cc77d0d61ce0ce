"""Short runs that train adapters on tiny models: their data, configuration and results."""

from collections.abc import Mapping
from pathlib import Path

from tiny_runs import metrics_of, run_values, write_counting_rows
from xorl.config import LoadedConfig, config_from_mapping
from xorl.lora import adapter_parameters
from xorl.train import build_run, train

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


def run(loaded: LoadedConfig) -> dict[str, tuple[int, ...]]:
    """Train to the end, as one rank does; returns the shapes of the adapters' parameters."""
    built = build_run(loaded.config)
    assert train(built) == 0
    built.observer.close()
    return {name: tuple(one.shape) for name, one in adapter_parameters(built.engine.model.module).items()}


def eval_losses(output: Path) -> dict[int, float]:
    """By step."""
    return {int(record["step"]): record["eval_loss"] for record in metrics_of(output) if "eval_loss" in record}


def last(output: Path) -> Path:
    """The checkpoint of the last step."""
    return output / "checkpoints" / f"global_step_{NUM_STEPS}"
