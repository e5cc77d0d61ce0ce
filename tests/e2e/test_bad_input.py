"""What a user can get wrong ends `xorl train` with a message that names it and exit code 2, and loses nothing."""

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tiny_models import hf_config, write_config
from xorl.train import output_dir
from xorl.train.output_dir import locked

CONFIG = """\
model:
  config_path: {folder}/model
data:
  datasets:
    - path: {folder}/train.jsonl
  dataset_prepared_path: {folder}/prepared
  sample_packing_sequence_len: 32
  dataloader_num_workers: 0
  pad_to_multiple_of: 8
train:
  output_dir: {folder}/output
  max_steps: 2
  log_format: structured
  use_wandb: false
"""
MODEL = hf_config(
    hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_config(tmp_path / "model", MODEL)
    rows = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 40
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


@pytest.fixture
def train(folder: Path, run_command):
    """(*arguments, prepare=None) -> how the command ended, run on the folder's configuration."""
    return partial(run_command, str(folder / "config.yaml"))


Change = Callable[[Path], list[str]]


def added(file: str, line: str) -> Change:
    def change(folder: Path) -> list[str]:
        with (folder / file).open("a") as opened:
            opened.write(line + "\n")
        return []

    return change


def of_model(*arguments: str, base: dict[str, object] = MODEL, **changes: object) -> Change:
    def change(folder: Path) -> list[str]:
        write_config(folder / "model", {**base, **changes})
        return list(arguments)

    return change


def given(*arguments: str) -> Change:
    return lambda folder: [argument.format(folder=folder) for argument in arguments]


def nothing_trained(folder: Path) -> list[str]:
    (folder / "train.jsonl").write_text('{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}\n' * 9)
    return []


def model_without_weights(folder: Path) -> list[str]:
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("config_path", "model_path"))
    return []


def weights_of_another_model(folder: Path) -> list[str]:
    save_file({"model.norm.weight": torch.ones(8)}, folder / "model" / "model.safetensors")
    return model_without_weights(folder)


def checkpoint_that_was_half_deleted(folder: Path) -> list[str]:
    (folder / "output" / "checkpoints" / "global_step_2" / "metadata.json").unlink()
    return [*AUTO, "--train.max_steps", "4"]


def without_hidden_files(folder: Path) -> list[str]:
    (folder / "output" / "checkpoints" / "global_step_2" / ".metadata").unlink()  # as `cp -r folder/* copy` does
    return [*AUTO, "--train.max_steps", "4"]


def with_a_byte_changed(folder: Path) -> list[str]:
    [file] = (folder / "output" / "checkpoints" / "global_step_2").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return [*AUTO, "--train.max_steps", "4"]


def latest_that_is_a_folder(folder: Path) -> list[str]:
    (folder / "output" / "checkpoints" / "latest").mkdir(parents=True)
    return [*AUTO]


AUTO = ("--train.load_checkpoint_path", "auto")
NF4 = ("--lora.enable_qlora", "true", "--lora.quant_format", "nf4")
CASES: dict[str, tuple[Change, list[str]]] = {
    "misspelt key": (added("config.yaml", "  weigth_decay: 0.1"), ["config.yaml:15", "weigth_decay", "weight_decay"]),
    "wrong type": (added("config.yaml", "  lr: fast"), ["config.yaml:15", "train.lr", "fast"]),
    "missing dataset": (
        given("--data.datasets.0.path", "{folder}/none.jsonl"),
        ["none.jsonl", "data.datasets"],
    ),
    "row not JSON": (added("train.jsonl", '{"input_ids": [1, 2'), ["train.jsonl, line 41"]),
    "row of two lengths": (
        added("train.jsonl", '{"input_ids": [1, 2, 3], "labels": [1, 2]}'),
        ["train.jsonl, line 41", "3", "2"],
    ),
    "id beyond the vocabulary": (
        added("train.jsonl", '{"input_ids": [1, 64], "labels": [1, 64]}'),
        ["train.jsonl, line 41", "64"],
    ),
    "nothing trained": (nothing_trained, ["no token", "train.jsonl"]),
    "checkpoint of another model": (
        of_model(*AUTO, "--train.max_steps", "4", hidden_size=24),
        [
            "train.load_checkpoint_path: ",
            "is of another model than the section model describes",
            "hidden_size: 16, not 24",
        ],
    ),
    "output holds a run": (given(), ["train.output_dir", "global_step_2", "auto"]),
    "checkpoint half deleted": (
        checkpoint_that_was_half_deleted,
        ["train.output_dir", "global_step_2 is not complete", "move it away"],
    ),
    "checkpoint without hidden files": (
        without_hidden_files,
        ["train.load_checkpoint_path: ", "global_step_2 is damaged", ".metadata is missing", "Copy the folder again"],
    ),
    "checkpoint with a byte changed": (
        with_a_byte_changed,
        ["train.load_checkpoint_path: ", "global_step_2 is damaged", "distcp has changed", "Copy the folder again"],
    ),
    "latest is a folder": (
        latest_that_is_a_folder,
        ["train.output_dir: ", "checkpoints/latest is a folder", "rename it"],
    ),
    "rows that a group does not divide": (
        of_model(*NF4, hidden_size=64, head_dim=64, intermediate_size=96),
        ["lora.quant_group_size: ", "rows of 96 weights", "groups of 64, but into groups of 32"],
    ),
    "output not writable": (
        given("--train.output_dir", "{folder}/train.jsonl/output"),
        ["train.output_dir", "train.jsonl/output"],
    ),
    "sizes do not divide": (
        given("--nproc-per-node", "4", "--train.data_parallel_shard_size", "3"),
        ["train.data_parallel_shard_size", "4"],
    ),
    "document without positions": (
        of_model(
            "--data.pad_to_multiple_of", "4", base=hf_config("gpt2", n_embd=16, n_layer=1, n_head=2, n_positions=4)
        ),
        ["data.datasets: a document of 8 tokens", "4 learned positions", "max_seq_len: 4"],
    ),
    "attention that cannot run": (
        given("--model.attn_implementation", "flash_attention_4"),
        ["model.attn_implementation", "CUDA", "xorl-kernels[fa4]", "eager, sdpa"],
    ),
    "no such checkpoint": (
        given("--train.load_checkpoint_path", "global_step_9"),
        ["train.load_checkpoint_path", "global_step_9 does not exist"],
    ),
    "model not known": (given("--model.config_path", "{folder}/nowhere"), ["model.config_path", "nowhere"]),
    "architecture not known": (
        of_model(architectures=["MambaForCausalLM"]),
        ["config.yaml:2: model.config_path: ", "model/config.json: ", "MambaForCausalLM", "Qwen3ForCausalLM"],
    ),
    "architecture that cannot be": (
        of_model(num_hidden_layers=0),
        ["config.yaml:2: model.config_path: ", "model/config.json: ", "num_hidden_layers must be at least 1, got 0"],
    ),
    "model without weights": (
        model_without_weights,
        ["config.yaml:2: model.model_path: ", "model contains no model.safetensors"],
    ),
    "weights of another model": (
        weights_of_another_model,
        [
            "config.yaml:2: model.model_path: the weights do not belong to the configured model",
            "model.norm.weight: [8] in the file",
        ],
    ),
}
# What does not go with the model, which is found before data are prepared.
BEFORE_DATA: dict[str, tuple[Change, list[str]]] = {
    "layers of adapters": (
        given("--lora.enable_lora=true", '--lora.lora_target_modules=["q_prj"]'),
        ["lora.lora_target_modules", "q_prj"],
    ),
    "layers to recompute": (given("--train.recompute_num_layers=2"), ["train.recompute_num_layers: 2", "1 layers"]),
    "no adapter": (
        given("--lora.enable_lora=true", "--lora.adapter_path={folder}/none"),
        ["lora.adapter_path", "none"],
    ),
    "layers left out": (given(*NF4, '--lora.exclude_modules=["gate"]'), ["lora.exclude_modules", "gate"]),
    "size of groups": (
        given("--lora.enable_qlora=true", "--lora.quant_group_size=48"),
        ["lora.quant_group_size", "48"],
    ),
    "layers of a sweep": (
        given("--lora.enable_lora=true", "--lora.sweep=[{{name: a, lora_target_modules: [q_prj]}}]"),
        ["lora.lora_target_modules", "q_prj"],
    ),
}
AFTER_A_RUN = {case for case in CASES if case.startswith("checkpoint ")} | {"output holds a run"}


@pytest.mark.parametrize("case", [*CASES, *BEFORE_DATA])
def test_bad_input_is_told_and_ends_with_2(case: str, folder: Path, train) -> None:
    # Catches tracebacks in place of messages, messages that do not name the place, exit codes of success, and a typo in
    # a layer's name that is found an hour later, when the data are ready.
    if case in AFTER_A_RUN:
        assert train().returncode == 0
    prepare, named = {**CASES, **BEFORE_DATA}[case]
    result = train(*prepare(folder))
    assert result.returncode == 2, result.stderr
    missing = [text for text in named if text not in result.stderr]
    assert not missing, f"{missing} not in:\n{result.stderr}"
    assert "Traceback" not in result.stderr
    assert case not in BEFORE_DATA or not (folder / "prepared").exists()


def test_an_unknown_wandb_mode_is_told_before_anything_starts(folder: Path, train, monkeypatch) -> None:
    # Catches a traceback of wandb, after the data is prepared and the model is loaded.
    monkeypatch.setenv("WANDB_MODE", "of")
    result = train("--train.use_wandb", "true", "--train.log_level", "DEBUG")
    assert result.returncode == 2
    assert "WANDB_MODE must be one of online, offline, shared, disabled, got 'of'" in result.stderr
    assert "Traceback" not in result.stderr
    assert "phase=" not in result.stderr


def test_a_refusal_under_torchrun_is_told_first_and_last(folder: Path) -> None:
    # Catches a reason that stands only inside torchrun's own traceback.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "-m", "xorl.cli.train", str(folder / "config.yaml"), "--train.lrr", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    reason, noise = "error: ", "ChildFailedError"
    assert ended.returncode == 1
    assert ended.stderr.index(reason) < ended.stderr.index(noise)
    assert ended.stderr.index("did you mean train.lr?") < ended.stderr.index(noise)
    last = ended.stderr[ended.stderr.rindex("\n\n") :]
    assert "did you mean train.lr?" in last, ended.stderr


def test_run_that_is_complete_says_so_and_ends_with_0(folder: Path, train) -> None:
    # Catches a second start that trains again, or that fails.
    assert train("--train.load_checkpoint_path", "auto").returncode == 0
    before = (folder / "output" / "metrics.jsonl").read_text()
    again = train("--train.load_checkpoint_path", "auto")
    assert again.returncode == 0
    assert "another folder with --train.output_dir" in again.stderr
    assert (folder / "output" / "metrics.jsonl").read_text() == before
    # Catches the advice to choose another folder where one was chosen.
    checkpoint, other = folder / "output" / "checkpoints" / "global_step_2", folder / "other"
    options = ("--train.load_checkpoint_path", str(checkpoint), "--train.output_dir", str(other))
    elsewhere = train(*options)
    assert elsewhere.returncode == 0
    assert f"complete={checkpoint}: " in elsewhere.stderr
    assert f"nothing was trained in {other}. Continue it with more steps (train.max_steps" in elsewhere.stderr
    assert "another folder" not in elsewhere.stderr
    assert train(*options, "--train.max_steps", "3").returncode == 0


def test_a_run_waits_for_another_one_that_ends_in_its_folder(folder: Path, train) -> None:
    # Catches two runs that remove each other's saves and cut each other's metrics back.
    with ExitStack() as stack:
        stack.enter_context(locked(folder / "output"))
        timer = threading.Timer(2, stack.close)
        timer.start()
        result = train()
        timer.join()
    assert result.returncode == 0, result.stderr
    assert f"another run writes to {folder}/output (process {os.getpid()} on " in result.stderr


def test_a_folder_that_another_run_keeps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches a wait without end, and a lock that stays when its run has ended.
    monkeypatch.setattr(output_dir, "LOCK_TIMEOUT_S", 0.1)
    told = pytest.raises(ValueError, match=rf"train\.output_dir: another .*process {os.getpid()} on")
    with locked(tmp_path), told, locked(tmp_path):
        raise AssertionError("two runs have it")
    with locked(tmp_path):
        pass


def test_a_save_that_fails_is_told_in_a_few_lines_and_leaves_the_former_checkpoint(folder: Path, train) -> None:
    # Catches forty lines of libraries around "no space left", and a half-written checkpoint that stays.
    def limit() -> None:
        # Larger than what a run writes beside its tensors, and smaller than those.
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    assert train("--train.max_steps", "1").returncode == 0
    options = ("--train.load_checkpoint_path", "auto", "--train.max_steps", "2")
    result = train(*options, prepare=limit)
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert "error: step 2: " in result.stderr
    assert "global_step_1 is complete" in result.stderr
    names = sorted(file.name for file in (folder / "output" / "checkpoints").iterdir())
    assert names == ["global_step_1", "global_step_1-export", "latest"]
    assert train(*options).returncode == 0


@pytest.mark.parametrize(
    ("entry", "options", "named"),
    [
        ("model.basic_modules: [Lniear]", [], "no module is named Lniear; the model has"),
        (
            "model.basic_modules: [LinearAdapter]",
            ["--lora.enable_lora=true", '--lora.lora_target_modules=["o_proj", "lm_head"]'],
            "LinearAdapter is also part of the model's head",
        ),
        ("model.attn_implementation: flash_attention_2", [], "'flash_attention_2' cannot run here: it needs a CUDA"),
        ("train.fp8: rowwise", ["--model.foundation={intermediate_size: 40}"], "multiples of 16"),
        (
            "train.no_decay_modules: [nrom]",
            ["--train.weight_decay=0.1"],
            "train.no_decay_modules: no parameter matches nrom",
        ),
        (
            "train.no_decay_params: [nobias]",
            ["--train.weight_decay=0.1", "--train.no_decay_modules=[norm]"],
            "train.no_decay_params: no parameter matches nobias",
        ),
        ("train.enable_cpu_offload: true", [], "the model trains on the CPU"),
        ("train.enable_activation_offload: true", [], "the model trains on the CPU"),
        ("train.init_device: cuda", [], "torch finds no GPU here"),
        ("train.enable_compile: true", [], "but nowhere was not found; install it"),
    ],
)
def test_what_cannot_be_trained_here_is_told_with_its_line_before_data_are_prepared(
    entry: str, options: list[str], named: str, folder: Path, train, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Catches refusals, and tracebacks, that come an hour later, when the data are ready.
    monkeypatch.setenv("CXX", "nowhere")
    config = folder / "config.yaml"
    section, _, line = entry.partition(".")
    config.write_text(config.read_text().replace(f"{section}:\n", f"{section}:\n  {line}\n", 1))
    number = config.read_text().splitlines().index(f"  {line}") + 1
    result = train(*options)
    assert result.returncode == 2, result.stderr
    assert f"error: {config}:{number}: {entry.partition(':')[0]}" in result.stderr
    assert named in result.stderr
    assert not (folder / "prepared").exists()
