"""The quickstart with images: what it learns is in the pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiny_runs import metrics_of
from xorl.config import load_config
from xorl.train import build_run, train

ROOT = Path(__file__).resolve().parents[2]
CONFIG, ROWS = ROOT / "configs" / "quickstart_vision.yaml", ROOT / "configs" / "quickstart_vision"
NUM_STEPS = 120


def whole_answers(folder: Path, *overrides: str) -> float:
    """The fraction of held-out answers that are right as a whole at the end of a run."""
    options = [f"--train.output_dir={folder}", f"--data.dataset_prepared_path={folder}-prepared", *overrides]
    train(build_run(load_config(CONFIG, [part for one in options for part in one.split("=", 1)]).config))
    return [record["eval_accuracy"] for record in metrics_of(folder) if "eval_accuracy" in record][-1]


@pytest.mark.multi
def test_answers_are_right_and_at_chance_with_the_pictures_of_others(
    tmp_path: Path, run_ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Catches features that never reach the decoder, or tokens of another picture: the loss would fall all the same, to
    # that of guessing.
    monkeypatch.chdir(ROOT)
    steps = (f"--train.max_steps={NUM_STEPS}", f"--train.eval_steps={NUM_STEPS}")
    [right] = run_ranks(lambda: whole_answers(tmp_path / "run", *steps), 1)
    assert right > 0.7
    rows = [json.loads(line) for line in (ROWS / "heldout.jsonl").read_text().splitlines()]
    questions = [row["messages"][0] for row in rows]
    for row, question in zip(rows, [*questions[1:], questions[0]], strict=True):
        row["messages"][0] = question
    exchanged = tmp_path / "exchanged.jsonl"
    exchanged.write_text("".join(json.dumps(row) + "\n" for row in rows))
    export = tmp_path / "run" / "checkpoints" / f"global_step_{NUM_STEPS}-export"
    again = (
        f"--model.model_path={export}",
        "--train.max_steps=1",
        "--train.lr=1e-9",
        f'--data.test_datasets=[{{"path": "{exchanged}", "type": "chat"}}]',
    )
    [wrong] = run_ranks(lambda: whole_answers(tmp_path / "again", *again), 1)
    assert wrong < 0.1
