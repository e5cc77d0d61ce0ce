"""A run that diverges says at which step, and which of its bins to look at."""

import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tiny_models import hf_config, write_config
from tiny_runs import metrics_of, write_run
from xorl.cli.app import main
from xorl.config import load_config
from xorl.train import DivergedError, build_run, train
from xorl.train.loop import Run

POISON = 63


def write_config_file(folder: Path, streaming: bool, output: str = "output") -> Path:
    options = {
        "data": {"streaming": streaming, "sample_packing_sequence_len": 32},
        "data_parallel_mode": "ddp",
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "max_steps": 3,
    }
    return write_run(folder / f"{output}.yaml", folder, folder / output, **options)


def write_rows(folder: Path, num_rows: int, length: int, is_poisoned: Callable[[int], bool]) -> None:
    """Rows of counting tokens, some of which end with POISON, beside a model."""
    with (folder / "train.jsonl").open("w") as file:
        for number in range(num_rows):
            ids = [(number + place) % 50 for place in range(length)]
            file.write(json.dumps({"input_ids": [*ids, POISON if is_poisoned(number) else 0]}) + "\n")
    write_config(folder / "model", hf_config())


def poisoned(config: Path, overrides: Sequence[str], rows: int | slice, name: str = "model.embed_tokens") -> Run:
    """A run on a model with NaN in these rows of a weight."""
    run = build_run(load_config(config, overrides).config)
    with torch.no_grad():
        run.engine.model.module.get_submodule(name).get_parameter("weight")[rows] = math.nan
    return run


def error_of(config: Path, *overrides: str, rows: int | slice = POISON, name: str = "model.embed_tokens") -> str:
    """What ends a run on a model with NaN in these rows of a weight."""
    with pytest.raises(DivergedError) as raised:
        train(poisoned(config, overrides, rows, name))
    return str(raised.value)


@pytest.mark.parametrize("streaming", [True, False])
def test_bins_of_a_step_that_diverged_are_named(
    streaming: bool, tmp_path: Path, run_ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Catches a run of weeks that ends with the number of a step, whose order of data nobody knows; bins that are those
    # of one rank alone, or that are counted otherwise than where they can be looked at.
    write_rows(tmp_path, 60, 20, lambda number: number % 6 == 0)
    config = write_config_file(tmp_path, streaming)
    told = set(run_ranks(lambda: error_of(config), 2))
    assert len(told) == 1
    found = re.fullmatch(
        r"step (\d): loss nan, .*not saved\. The loss of (\d) of its 8 bins is not finite \(([\d, ]+)\).* --bin \d+.*",
        told.pop(),
    )
    assert found is not None
    bins = found[3].split(", ")
    assert len(bins) == int(found[2]) < 8
    for number in bins:
        monkeypatch.setattr(sys, "argv", ["xorl", "data", "inspect", str(config), "--bin", number])
        with pytest.raises(SystemExit):
            main()
        assert f" {POISON} " in capsys.readouterr().out
    (tmp_path / "output" / "metrics.jsonl").unlink()
    told = set(run_ranks(lambda: error_of(config, rows=slice(None)), 2))
    assert re.fullmatch(r"step 1: .* None of its 8 bins has a finite loss: lower train\.lr\. .*", told.pop())


def trained_with_skips(config: Path, *overrides: str) -> tuple[list[dict], dict[str, int]]:
    """The metrics of a run on a model that computes NaN from a token, and the non-finite values in its weights."""
    run = poisoned(config, overrides, POISON)
    train(run)
    run.observer.close()
    bad = {name: int((~torch.isfinite(weight)).sum()) for name, weight in run.engine.model.module.named_parameters()}
    return metrics_of(run.startup.output_dir), {name: count for name, count in bad.items() if count}


def test_steps_that_are_not_finite_are_skipped_and_reported(tmp_path: Path, run_ranks) -> None:
    # Catches NaN that reaches the weights, a report that disturbs the steps after it, and a run that never ends.
    write_rows(tmp_path, 120, 30, lambda number: number == 30)
    config = write_config_file(tmp_path, streaming=False)
    options = ["--train.on_nonfinite", "skip", "--train.max_steps", "15", "--train.save_steps", "100"]
    (metrics, bad), _ = run_ranks(lambda: trained_with_skips(config, *options), 2)
    skipped = [record["step"] for record in metrics if record["loss"] == "nan"]
    assert len(skipped) == 1
    assert len(metrics) == 15
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    # The head is tied to the embedding or not; nothing but the poisoned row is affected.
    assert bad == {"model.embed_tokens.weight": 32}
    [report] = [json.loads(line) for line in (tmp_path / "output" / "nonfinite.jsonl").read_text().splitlines()]
    assert report["step"] == skipped[0]
    assert len(report["bins"]) == 1
    assert "model.layers.0.self_attn.qkv_proj.weight" in report["parameters"]
    other = write_config_file(tmp_path, streaming=False, output="other")
    for told in run_ranks(lambda: error_of(other, *options, rows=0, name="model.norm"), 2):
        assert "10 steps in a row were skipped" in told
