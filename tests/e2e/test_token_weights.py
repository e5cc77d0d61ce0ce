"""A column of token weights: runs, sweeps and their evaluations multiply the loss of each label by its weight."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from saved_models import save_model
from tiny_models import hf_config
from tiny_runs import metrics_of, run_values
from xorl.config import config_from_mapping
from xorl.train import build_run, train
from xorl.train.sweep.build import build_sweep

MEASURED = ("loss", "grad_norm", "num_trained_tokens", "eval_loss", "eval_token_accuracy", "eval_num_tokens")
Row = Mapping[str, list[float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    save_model(root / "base", hf_config(tie_word_embeddings=False))
    return root


def masked(ids: list[int]) -> Row:
    return {"input_ids": ids, "labels": [each if each % 3 else -100 for each in ids]}


def weighted(ids: list[int], weight: float = 1.0) -> Row:
    return {"input_ids": ids, "weights": [weight if each % 3 else 0.0 for each in ids]}


def measured(folder: Path, name: str, row_of: Callable[[list[int]], Row], *, is_sweep: bool) -> list[dict[str, float]]:
    """Of each step and evaluation of a run over rows that `row_of` writes."""
    rows = [row_of([(index + offset) % 60 for offset in range(6 + index % 7)]) for index in range(30)]
    (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    documents = [{"path": str(folder / f"{name}.jsonl")}]
    output = folder / f"{name}, {is_sweep}"
    values = run_values(
        folder,
        output,
        model={"model_path": str(folder / "base")},
        data={
            "datasets": documents,
            "test_datasets": documents,
            "select_columns": list(rows[0]),
            "shuffle_merged_datasets": False,
            "shuffle_before_merging_datasets": False,
            "sample_packing_sequence_len": 32,
        },
        lora={"enable_lora": True, "lora_rank": 4, "sweep": [{"name": "a"}] if is_sweep else []},
        max_steps=2,
        gradient_accumulation_steps=2,
        max_grad_norm=None,
        save_epochs=0.0,
        save_steps=0,
    )
    config = config_from_mapping(values).config
    job = build_sweep(config) if is_sweep else build_run(config)
    train(job)
    job.close()
    metrics = metrics_of(output / "sweep" / "a" if is_sweep else output)
    return [{name: each[name] for name in MEASURED if name in each} for each in metrics]


@pytest.mark.parametrize("is_sweep", [False, True])
def test_weights_multiply_the_loss_of_their_labels(folder: Path, *, is_sweep: bool) -> None:
    # Catches weights that are read and then not used, so that tokens of weight 0 are trained on, an evaluation that
    # counts them, and a mean over other tokens than those that have a weight.
    plain = measured(folder, "masked", masked, is_sweep=is_sweep)
    assert len(plain) == 4
    for found, wanted in zip(measured(folder, "weighted", weighted, is_sweep=is_sweep), plain, strict=True):
        assert found == pytest.approx(wanted, rel=1e-6)
    tripled = measured(folder, "tripled", lambda ids: weighted(ids, 3.0), is_sweep=is_sweep)
    for kind in ("loss", "grad_norm", "eval_loss"):
        first, wanted = (next(each[kind] for each in metrics if kind in each) for metrics in (tripled, plain))
        assert first == pytest.approx(3 * wanted, rel=1e-6), kind
