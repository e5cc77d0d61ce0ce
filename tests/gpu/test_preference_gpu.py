"""Runs on pairs of answers in bf16 on a GPU: adapters start as their reference, and the model learns to prefer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from xorl.config import load_config
from xorl.core import runtime
from xorl.train import build_run, train

pytestmark = pytest.mark.gpu

EXAMPLE = Path(__file__).resolve().parents[2] / "configs" / "local" / "preference.yaml"
OVERRIDES = (
    *("--train.enable_mixed_precision", "true"),
    *("--train.data_parallel_mode", "none"),
    *("--train.max_steps", "60"),
    *("--train.save_hf_weights", "false"),
)
LORA = ("--lora.enable_lora", "true", "--lora.lora_rank", "8", "--lora.lora_target_modules", "all-linear")


@pytest.fixture(scope="module", autouse=True)
def shut_down() -> Iterator[None]:
    yield
    runtime.shutdown()


def evaluations(folder: Path, loss: str, *overrides: str) -> list[dict[str, float]]:
    """The evaluations before the first and after the last step."""
    own = (
        "--train.loss",
        loss,
        "--train.output_dir",
        str(folder),
        "--data.dataset_prepared_path",
        str(folder / "data"),
    )
    run = build_run(load_config(EXAMPLE, [*OVERRIDES, *own, *overrides]).config)
    run.checkpoints.prepare(0)
    train(run, saves_on_signal=False)
    run.close()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "eval_loss" in record]


@pytest.mark.parametrize("loss", ["dpo", "kto", "simpo"])
def test_a_tiny_model_learns_to_prefer_in_bf16(loss: str, tmp_path: Path) -> None:
    # Catches log-probabilities of the fused head that lose a preference, and scores of the initial model that are of
    # another precision than those of the steps.
    first, last = evaluations(tmp_path, loss)
    if loss != "simpo":
        assert abs(first["eval_reward_margin"]) < 1e-3
    assert last["eval_reward_accuracy"] > 0.9


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_adapters_start_as_their_reference(loss: str, tmp_path: Path) -> None:
    # Catches kernels that compute the base otherwise when its adapters are off.
    first, last = evaluations(tmp_path, loss, *LORA)
    assert abs(first["eval_reward_margin"]) < 1e-3
    assert last["eval_reward_margin"] > 1e-3
