"""A sweep: each member learns what a run of its own would, is resumed to the bit, and is exported for PEFT."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from saved_models import save_model
from tiny_models import hf_config
from tiny_runs import metrics_of, run_values, write_counting_rows
from xorl.config import LoadedConfig, config_from_mapping
from xorl.train import build_run, train
from xorl.train.export.source import open_saved
from xorl.train.run import run_training

NUM_STEPS = 4
WEIGHTS = "adapter_model.safetensors"
MEMBERS: dict[str, dict[str, object]] = {
    "small": {"lora_rank": 2, "lora_alpha": 4.0, "lr": 0.01, "seed": 7},
    "large": {"lora_rank": 12, "lora_target_modules": ["q_proj", "v_proj", "lm_head"], "weight_decay": 0.3},
    "other-data": {"lr": 0.03},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, a model of transformers, and two files in which a token is the one before plus one, or two."""
    root = tmp_path_factory.mktemp("sweep")
    save_model(root / "base", hf_config(tie_word_embeddings=False))
    for step in (1, 2):
        write_counting_rows(root / f"by_{step}.jsonl", 40, step=step, vocab_size=60)
    return root


def config_of(
    folder: Path, output: Path, lora: Mapping[str, object], data: str = "by_1.jsonl", **options: object
) -> LoadedConfig:
    values = run_values(
        folder,
        output,
        model={"model_path": str(folder / "base")},
        data={
            "datasets": [{"path": str(folder / data)}],
            "test_datasets": [{"path": str(folder / "by_1.jsonl")}],
            "sample_packing_sequence_len": 32,
        },
        lora={"enable_lora": True, **lora},
        **{
            "max_steps": NUM_STEPS,
            "gradient_accumulation_steps": 2,
            "lr": 0.02,
            "save_epochs": 0.0,
            "save_steps": 2,
            **options,
        },
    )
    return config_from_mapping(values)


def swept(folder: Path, output: Path, **options: object) -> LoadedConfig:
    members = [{"name": name, **own} for name, own in MEMBERS.items()]
    members[2]["datasets"] = [{"path": str(folder / "by_2.jsonl")}]
    members_per_pass = options.pop("sweep_members_per_pass", None)
    # The files of one whose layers mostly follow a pattern give that as its own alpha.
    pattern = {"q_proj": 8.0, "v_proj": 8.0}
    lora = {"lora_rank": 4, "sweep": members, "sweep_members_per_pass": members_per_pass, "alpha_pattern": pattern}
    return config_of(folder, output, lora, **options)


@pytest.fixture(scope="module")
def output(folder: Path) -> Path:
    """The results of a whole sweep."""
    assert run_training(swept(folder, folder / "out")) == 0
    return folder / "out"


def test_a_sweep_says_once_what_its_members_share(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches three lines for each member, in which nobody finds what differs."""
    lora = {"lora_rank": 4, "sweep": [{"name": "one"}, {"name": "two"}, {"name": "three", "lr": 0.03}]}
    assert run_training(config_of(folder, tmp_path, lora, max_steps=1)) == 0
    lines = [line.split(" level=INFO ")[-1] for line in capsys.readouterr().err.splitlines()]
    titles = [line.partition(": ")[0] for line in lines if line.startswith(("Data", "Steps", "Optimizer"))]
    assert titles == ["Data", "Steps", "Optimizer of one, two", "Optimizer of three"]


@pytest.mark.parametrize("name", MEMBERS)
def test_each_member_is_its_own_separate_run(folder: Path, output: Path, name: str, tmp_path: Path):
    """Catches data, seeds, schedules, clipping or decay that members share, and divisors that count others' tokens."""
    own = dict(MEMBERS[name])
    options = {key: own.pop(key) for key in ("lr", "weight_decay", "seed") if key in own}
    data = "by_2.jsonl" if name == "other-data" else "by_1.jsonl"
    own = {"lora_rank": 4, "alpha_pattern": {"q_proj": 8.0, "v_proj": 8.0}, **own}
    alone = build_run(config_of(folder, tmp_path, own, data, **options).config)
    assert train(alone) == 0
    alone.observer.close()
    wanted, got = metrics_of(tmp_path), metrics_of(output / "sweep" / name)
    assert len(wanted) == len(got) == NUM_STEPS + 2
    for one, other in zip(wanted, got, strict=True):
        for key, value in other.items():
            assert one[key] == pytest.approx(value, rel=1e-4), (one["step"], key)
    assert alone.checkpoints.saves.last is not None
    values = load_file(alone.checkpoints.saves.last / WEIGHTS)
    exported = load_file(output / "sweep" / name / "adapter" / WEIGHTS)
    torch.testing.assert_close(exported, values, rtol=1e-3, atol=1e-5)
    assert any(value.abs().max() > 1e-3 for key, value in exported.items() if "lora_B" in key)
    saved = load_file(output / "checkpoints" / f"global_step_{NUM_STEPS}" / "adapters" / name / WEIGHTS)
    assert all(torch.equal(value, saved[key]) for key, value in exported.items())


@pytest.mark.parametrize("members_per_pass", [None, 2])
def test_a_resumed_sweep_goes_on_to_the_bit(folder: Path, output: Path, tmp_path: Path, members_per_pass: int | None):
    """Catches optimizer states, counts or places in the data that a checkpoint lacks, and passes that change sums."""
    path = str(output / "checkpoints" / "global_step_2")
    loaded = swept(folder, tmp_path, load_checkpoint_path=path, sweep_members_per_pass=members_per_pass)
    assert run_training(loaded) == 0
    for name in MEMBERS:
        exported = load_file(tmp_path / "sweep" / name / "adapter" / WEIGHTS)
        for key, value in load_file(output / "sweep" / name / "adapter" / WEIGHTS).items():
            if members_per_pass is None:
                assert torch.equal(value, exported[key]), (name, key)
            else:
                torch.testing.assert_close(value, exported[key], rtol=1e-3, atol=1e-5)


def test_a_sweep_that_goes_on_beyond_its_end_exports_what_it_has_learnt(folder: Path, tmp_path: Path):
    """Catches adapters of the former end that are left in place of those of the new one, and notes that are lost."""
    assert run_training(swept(folder, tmp_path, max_steps=2)) == 0
    (tmp_path / "sweep" / "small" / "adapter" / "notes.txt").write_text("kept")
    assert run_training(swept(folder, tmp_path, load_checkpoint_path="auto")) == 0
    for name in MEMBERS:
        exported = load_file(tmp_path / "sweep" / name / "adapter" / WEIGHTS)
        saved = load_file(tmp_path / "checkpoints" / f"global_step_{NUM_STEPS}" / "adapters" / name / WEIGHTS)
        assert all(torch.equal(value, saved[key]) for key, value in exported.items())
    [former] = (tmp_path / "sweep" / "small").glob("adapter_former_*")
    assert (former / "notes.txt").read_text() == "kept"
    assert load_file(former / WEIGHTS).keys() == load_file(tmp_path / "sweep" / "small" / "adapter" / WEIGHTS).keys()


def test_a_sweep_does_not_go_on_with_another_model(folder: Path, tmp_path: Path):
    """Catches adapters that are scaled otherwise from one step to the next, or laid over a base of the same shapes."""
    quantized = {"enable_qlora": True, "lora_rank": 4, "sweep": [{"name": "one"}]}
    on = {"load_checkpoint_path": "auto"}
    other = folder / "other"
    save_model(other / "base", hf_config(tie_word_embeddings=False), seed=1)
    (other / "by_1.jsonl").write_text((folder / "by_1.jsonl").read_text())
    assert run_training(config_of(folder, tmp_path, quantized, max_steps=2)) == 0
    for loaded, said in (
        (config_of(folder, tmp_path, {**quantized, "lora_alpha": 4.0}, **on), r"lora\.lora_alpha: 4\.0.*with 16\.0"),
        (
            config_of(other, tmp_path, quantized, **on),
            r"does not contain its base and was trained over .*base with the",
        ),
        (
            config_of(folder, tmp_path, {**quantized, "enable_qlora": False}, **on),
            "a base with lora.enable_qlora: true",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            run_training(loaded)


def test_a_complete_sweep_says_so_and_other_members_are_refused(folder: Path, output: Path):
    """Catches a sweep that trains beyond its end, and one that goes on with another's states."""
    assert run_training(swept(folder, output, load_checkpoint_path="auto")) == 0
    other = {"sweep": [{"name": "small"}]}
    with pytest.raises(ValueError, match=r"the checkpoint is of a sweep of large, other-data, small, and lora\.sweep"):
        run_training(config_of(folder, output, other, load_checkpoint_path="auto"))


def test_what_takes_one_adapter_asks_for_a_member(folder: Path, output: Path, tmp_path: Path):
    """Catches an export of the bare base, and runs that go on from a checkpoint which is not theirs."""
    with pytest.raises(ValueError, match=r"is a checkpoint of a sweep.*members: large, other-data, small"):
        open_saved(str(output))
    saved = open_saved(str(output / "checkpoints" / "global_step_4" / "adapters" / "small"))
    assert saved.adapter is not None
    assert saved.adapter.layout.config.spec.rank == 2
    with pytest.raises(ValueError, match="the checkpoint is of a sweep"):
        build_run(config_of(folder, output, {}, load_checkpoint_path="auto").config)
    with pytest.raises(ValueError, match=r"lora\.sweep: `xorl train` trains its members"):
        build_run(swept(folder, tmp_path).config)


def test_peft_reads_each_export(folder: Path, output: Path):
    """Catches an export under the bank's ranks or names, in place of the adapter's own."""
    for name in MEMBERS:
        model = AutoModelForCausalLM.from_pretrained(folder / "base")
        ids = torch.arange(20)[None] % 60
        before = model(ids).logits
        peft = PeftModel.from_pretrained(model, output / "sweep" / name / "adapter")
        assert (peft(ids).logits - before).abs().max() > 1e-2


def test_a_member_that_diverges_leaves_the_others_alone(folder: Path, output: Path, tmp_path: Path):
    """Catches a bad learning rate of one member that ends or spoils the runs of the others."""
    loaded = swept(folder, tmp_path)
    members = [
        member.model_copy(update={"lr": 1e30} if member.name == "other-data" else {})
        for member in loaded.config.lora.sweep
    ]
    config = loaded.config.model_copy(update={"lora": loaded.config.lora.model_copy(update={"sweep": members})})
    assert run_training(LoadedConfig(config, loaded.origins, None)) == 0
    assert not (tmp_path / "sweep" / "other-data" / "adapter").exists()
    assert len(metrics_of(tmp_path / "sweep" / "other-data")) < NUM_STEPS + 2
    for name in ("small", "large"):
        exported = load_file(tmp_path / "sweep" / name / "adapter" / WEIGHTS)
        for key, value in load_file(output / "sweep" / name / "adapter" / WEIGHTS).items():
            torch.testing.assert_close(value, exported[key], rtol=1e-3, atol=1e-5)
