"""A run that is stopped while it evaluates: nothing trained is lost, and the evaluation is made up for."""

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from saved_models import save_model
from tiny_models import hf_config
from tiny_runs import run_values, write_counting_rows
from xorl.ckpt.layout import latest_checkpoint
from xorl.config import Config, config_from_mapping
from xorl.core import runtime
from xorl.train import RunComplete, build_run, train
from xorl.train.evaluate import Evaluation
from xorl.train.sweep.build import build_sweep

NUM_STEPS = 4


def signalled(evaluation: Evaluation, stopped_in: int) -> Evaluation:
    """In whose evaluation of this number, counted from 0, somebody asks the run to stop."""
    score, numbers = evaluation.score, count()

    def signalled_score(check: Callable[[], None]) -> dict[str, float]:
        if next(numbers) == stopped_in:
            signal.raise_signal(signal.SIGTERM)
        return score(check)

    return replace(evaluation, score=signalled_score)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, a model of transformers, and documents in which a token is the one before plus one."""
    root = tmp_path_factory.mktemp("evaluated")
    save_model(root / "base", hf_config(tie_word_embeddings=False))
    write_counting_rows(root / "documents.jsonl", 40, vocab_size=60)
    return root


def config_of(folder: Path, output: Path, *, is_sweep: bool, resumes: bool = False) -> Config:
    """An evaluation after every second step, and no save before the last; adapters with dropout draw random numbers."""
    documents = [{"path": str(folder / "documents.jsonl")}]
    varied = {"sweep": [{"name": "a"}, {"name": "b"}]} if is_sweep else {"lora_dropout": 0.1}
    values = run_values(
        folder,
        output,
        model={"model_path": str(folder / "base")},
        data={"datasets": documents, "test_datasets": documents, "sample_packing_sequence_len": 32},
        lora={"enable_lora": True, "lora_rank": 4, **varied},
        max_steps=NUM_STEPS,
        lr=0.02,
        save_epochs=0.0,
        save_steps=0,
        eval_steps=2,
        load_checkpoint_path="auto" if resumes else None,
    )
    return config_from_mapping(values).config


def run_of(config: Config, *, stopped_in: int | None = None) -> int:
    """Train, as one rank does; `stopped_in` is the evaluation of this process in which a signal comes."""
    if config.lora.sweep:
        sweep = build_sweep(config)
        if stopped_in is not None:
            for member in sweep.members[-1:]:
                assert member.evaluation is not None
                member.evaluation = signalled(member.evaluation, stopped_in)
        try:
            return train(sweep)
        finally:
            sweep.close()
            runtime.shutdown()
    run = build_run(config)
    if stopped_in is not None:
        assert run.evaluation is not None
        run = replace(run, evaluation=signalled(run.evaluation, stopped_in))
    try:
        return train(run)
    finally:
        run.observer.close()
        runtime.shutdown()


def told(output: Path) -> dict[str, list[dict[str, object]]]:
    """What all files of metrics say that does not depend on the clock."""
    kept = ("step", "loss", "grad_norm", "eval_loss", "eval_accuracy")
    files = sorted(output.glob("**/metrics.jsonl"))
    return {
        str(file.relative_to(output)): [
            {key: record[key] for key in kept if key in record} for record in map(json.loads, file.open())
        ]
        for file in files
    }


@pytest.mark.parametrize("is_sweep", [False, True])
def test_who_stops_an_evaluation_loses_neither_steps_nor_the_evaluation(folder: Path, tmp_path: Path, is_sweep: bool):
    """Catches steps that are lost to whoever does not wait for an evaluation, and evaluations that are never made."""
    assert run_of(config_of(folder, tmp_path / "whole", is_sweep=is_sweep)) == 0

    output = tmp_path / "stopped"
    resumed = config_of(folder, output, is_sweep=is_sweep, resumes=True)
    assert run_of(config_of(folder, output, is_sweep=is_sweep), stopped_in=1) == signal.SIGTERM
    assert (latest := latest_checkpoint(output / "checkpoints")) is not None
    assert latest.name == "global_step_2"
    # The process that goes on begins with the evaluation after step 2, and is stopped in the last one.
    assert run_of(resumed, stopped_in=1) == signal.SIGTERM
    assert (latest := latest_checkpoint(output / "checkpoints")) is not None
    assert latest.name == f"global_step_{NUM_STEPS}"
    assert not list(output.glob("**/README.md")), "exported before it was evaluated"
    assert run_of(resumed) == 0
    assert told(output) == told(tmp_path / "whole")
    exported = {path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").glob("**/README.md")}
    assert exported
    assert exported == {path.relative_to(output) for path in output.glob("**/README.md")}
    with pytest.raises(RunComplete):
        run_of(resumed)
    runtime.shutdown()


def test_an_evaluation_that_was_not_made_is_made_without_another_export(folder: Path, tmp_path: Path):
    """Catches an export that is refused since it is there, where metrics.jsonl was lost."""
    assert run_of(config_of(folder, tmp_path, is_sweep=False)) == 0
    first, *_, last = told(tmp_path)["metrics.jsonl"]
    (tmp_path / "metrics.jsonl").unlink()
    assert run_of(config_of(folder, tmp_path, is_sweep=False, resumes=True)) == 0
    assert told(tmp_path)["metrics.jsonl"] == [last] != [first]
