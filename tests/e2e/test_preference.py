"""Runs on pairs of answers: what they learn, what they compare with, and which configurations are refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tiny_runs import BARE, QUICKSTART, metrics_of, run_values, write_pairs
from xorl.ckpt.reader import source_shapes
from xorl.config import ConfigError, config_from_mapping, load_config
from xorl.train import build_run, train
from xorl.train.model_source import read_architecture

EXAMPLE = Path(__file__).resolve().parents[2] / "configs" / "local" / "preference.yaml"
ADAPTERS = {"enable_lora": True, "lora_rank": 8, "lora_target_modules": "all-linear"}
Records = list[dict[str, float]]


def values_of(folder: Path, output: str, loss: str = "dpo", **sections: dict[str, object]) -> dict[str, object]:
    """The options of a run of a few steps on the pairs in the folder."""
    values = run_values(
        folder,
        folder / output,
        model={"config_path": str(QUICKSTART / "config.json"), "tokenizer_path": str(QUICKSTART)},
        data={
            "datasets": [{"path": str(folder / "pairs.jsonl"), "type": "preference"}],
            "val_set_size": 20,
            "sample_packing_sequence_len": 256,
        },
        **{**BARE, "data_parallel_mode": "none", "loss": loss, "lr": 1e-3, "max_steps": 4},
    )
    return {name: {**section, **sections.get(name, {})} for name, section in values.items()}


def run(folder: Path, output: str, **options: object) -> Records:
    """Train in this process; the records of metrics.jsonl."""
    loaded = config_from_mapping(values_of(folder, output, **options))  # pyright: ignore[reportArgumentType]
    built = build_run(loaded.config)
    built.checkpoints.prepare(built.start_step)
    train(built, saves_on_signal=False)
    built.close()
    return metrics_of(folder / output)


def scores_in(folder: Path) -> set[str]:
    return {path.name for path in (folder / "prepared" / "references").glob("*")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pairs(tmp_path / "pairs.jsonl", 120)
    return tmp_path


def test_a_tiny_model_learns_to_prefer(folder: Path, run_ranks) -> None:
    # Catches a loss that goes down without teaching the preference.
    def learn() -> dict[str, float]:
        overrides = ["--data.dataset_prepared_path", str(folder / "prepared"), "--train.max_steps", "40"]
        loaded = load_config(EXAMPLE, [*overrides, "--train.output_dir", str(folder / "out")])
        built = build_run(loaded.config)
        built.checkpoints.prepare(0)
        train(built, saves_on_signal=False)
        return {key: float(value) for key, value in built.observer.last.items() if key.startswith("eval_")}

    [found] = run_ranks(learn, 1)
    assert found["eval_reward_accuracy"] > 0.9
    assert found["eval_loss"] < 0.5


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_adapters_are_off_for_the_base(loss: str, folder: Path, run_ranks) -> None:
    # Catches a model that is compared with itself, and a base that is not the one that the run started from.
    def both() -> tuple[Records, Records]:
        given = {"loss": loss, "lora": ADAPTERS}
        initial = run(folder, "initial", **given, train={"preference_reference": "initial"})
        assert len(scores_in(folder)) == 2
        return run(folder, "base", **given), initial

    [(base, initial)] = run_ranks(both, 1)
    for one, other in zip(base, initial, strict=True):
        prefix = "eval_" if "eval_loss" in one else ""
        for name in ("loss", "reward_chosen", "reward_rejected", "reward_accuracy"):
            assert one[prefix + name] == pytest.approx(other[prefix + name], rel=1e-4, abs=1e-5), name
    assert base[0]["eval_reward_margin"] == 0
    assert abs(base[-1]["eval_reward_margin"]) > 1e-3
    if loss == "kto":
        assert base[0]["eval_kl"] == 0
        assert any(record.get("kl", 0) > 0 for record in base)


def test_the_cache_keeps_scores_by_weights_and_pairs(folder: Path, run_ranks) -> None:
    # Catches pairs that are scored again at each start, and scores of other weights, of a model whose config.json has
    # changed, or of other pairs.
    model = folder / "model"
    model.mkdir()
    recipes = read_architecture(load_config(EXAMPLE).config.model).recipes(merge_qkv=True)

    def several() -> list[tuple[set[str], Records]]:
        found = []
        for number, (seed, theta) in enumerate(((1, 1e4), (1, 1e4), (2, 1e4), (2, 50.0))):
            config = json.loads((QUICKSTART / "config.json").read_text())
            (model / "config.json").write_text(json.dumps({**config, "rope_theta": theta}))
            generator = torch.Generator().manual_seed(seed)
            shapes = source_shapes(recipes).items()
            weights = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes}
            save_file(weights, model / "model.safetensors", {"format": "pt"})
            records = run(folder, f"out_{number}", model={"model_path": str(model), "config_path": None})
            found.append((scores_in(folder), records))
        return found

    [[(first, one), (second, same), (third, other), (fourth, turned)]] = run_ranks(several, 1)
    assert len(first) == 2  # of the pairs to train on and of those held out
    assert second == first
    assert len(third) == 4
    assert len(fourth) == 6
    for records in (one, same, other, turned):
        # A model is as far from itself as the rounding of its scores.
        assert records[0]["eval_reward_margin"] == pytest.approx(0, abs=1e-5)
    assert [record.get("loss") for record in one] == [record.get("loss") for record in same]


def test_a_run_resumed_with_another_loss_says_so(folder: Path, run_ranks, caplog: pytest.LogCaptureFixture) -> None:
    # Catches a run that changes what it minimises without a word.
    def resumed() -> list[str]:
        warnings = []
        for loss, steps in (("dpo", 1), ("dpo", 2), ("simpo", 3)):
            caplog.clear()
            options = {"max_steps": steps, "save_steps": 1, "load_checkpoint_path": "auto"}
            run(folder, "output", loss=loss, train=options)
            warnings.append(" ".join(each.getMessage() for each in caplog.records if each.levelname == "WARNING"))
        return warnings

    [[start, same, other]] = run_ranks(resumed, 1)
    assert "was saved with" not in start + same
    assert 'global_step_2 was saved with train.loss: "dpo", now "simpo"' in other


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "other rows": (
        {"data": {"datasets": [{"path": "a", "type": "chat"}]}},
        "loss dpo compares pairs of answers: set the type to preference",
    ),
    "pairs without their loss": ({"train": {"loss": "cross_entropy"}}, "set train.loss to dpo, orpo, kto or simpo"),
    "a sweep": (
        {"lora": {**ADAPTERS, "sweep": [{"name": "a"}]}},
        "a sweep trains with cross_entropy: train the members one by one",
    ),
    "the base of no adapters": ({"train": {"preference_reference": "base"}}, "there are no adapters to switch off"),
    "a base that is merged into": (
        {"train": {"preference_reference": "base"}, "lora": {**ADAPTERS, "merge_lora_interval": 2}},
        "merge_lora_interval changes the base, so the base is no reference: set it to initial",
    ),
    "a stream that is read once": (
        {"data": {"streaming": True, "val_set_size": None}},
        "a stream is read only once: set streaming to false, or train adapters",
    ),
    "several bins at once": (
        {"loss": "kto", "train": {"micro_batch_size": 2}},
        "kto compares the pairs of one bin: set micro_batch_size to 1",
    ),
    "pairs that are cut": (
        {"data": {"datasets": [{"path": "a", "type": "preference", "overflow": "truncate"}]}},
        "truncate would separate the answers of a pair: set it to drop or error",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_compare_pairs_is_refused(name: str, tmp_path: Path) -> None:
    # Catches options that are accepted and ignored.
    options, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        config_from_mapping(values_of(tmp_path, "out", **options))  # pyright: ignore[reportArgumentType]


def test_rows_that_are_no_pairs_are_refused(folder: Path, run_ranks) -> None:
    # Catches answers without a preference, and pairs of which both answers would be imitated.
    (folder / "single.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 40)
    single = {"data": {"datasets": [{"path": str(folder / "single.jsonl"), "type": "auto"}]}}
    pairs = {"data": {"datasets": [{"path": str(folder / "pairs.jsonl"), "type": "auto"}]}, "loss": "cross_entropy"}
    few = {"data": {"sample_packing_sequence_len": 30}, "loss": "kto"}

    def refused() -> list[str]:
        found = []
        for options in (single, pairs, few):
            with pytest.raises(ValueError, match=": ") as error:
                run(folder, "out", **options)
            found.append(str(error.value))
        return found

    [messages] = run_ranks(partial(refused), 1)
    assert "the rows are single documents, and train.loss: dpo compares pairs of answers" in messages[0]
    assert "the rows are pairs of a chosen and a rejected answer" in messages[1]
    assert "no bin of data.datasets has two pairs: raise it" in messages[2]


def test_a_stream_is_compared_with_the_base(folder: Path, run_ranks) -> None:
    # Catches pairs that are streamed as single documents.
    data = {"streaming": True, "val_set_size": None}
    [records] = run_ranks(lambda: run(folder, "out", data=data, lora=ADAPTERS), 1)
    assert records[0]["reward_margin"] == 0
    assert records[0]["num_pairs"] > 1
    assert records[-1]["reward_margin"] != 0
