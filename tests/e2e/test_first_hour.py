"""The first hour of a new user: one file that carries every option, and command lines that switch between its parts."""

import json
import re
from pathlib import Path

import pytest

from saved_models import save_model
from tiny_models import hf_config
from tiny_runs import metrics_of

BASE = """\
model:
  model_path: {folder}/base
  attention_cast_bf16: false
data:
  datasets:
    - path: {folder}/rows.jsonl
  test_datasets:
    - path: {folder}/rows.jsonl
  dataset_prepared_path: {folder}/prepared
  sample_packing_method: multipack
  sample_packing_group_size: 1000
  sample_packing_sequence_len: 32
  dataloader_num_workers: 0
  dataloader_prefetch_factor: 2
  pad_to_multiple_of: 8
train:
  output_dir: {folder}/output
  max_steps: 2
  eval_steps: 1
  save_epochs: 0
  save_hf_weights: false
  optimizer: adamw
  optimizer_dtype: bf16
  muon_lr: 0.05
  muon_momentum: 0.9
  muon_adjust_lr_fn: match_rms_adamw
  lr: 1e-3
  lr_min: 1e-5
  lr_decay_style: constant
  weight_decay: 0.1
  no_decay_modules: [norm]
  max_grad_norm: 0
  reshard_after_forward: false
  enable_gradient_checkpointing: true
  enable_profiling: false
  profile_start_step: 2
  profile_end_step: 3
  profile_trace_dir: {folder}/trace
  use_wandb: false
  wandb_project: mine
lora:
  enable_lora: false
  lora_rank: 4
  lora_alpha: 8
  save_lora_only: true
  enable_qlora: false
  quant_format: nf4
  quant_group_size: 32
  enable_aqn: false
  aqn_alpha: 0.5
"""
LORA, QLORA, MUON = (["--lora.enable_lora", "true"], ["--lora.enable_qlora", "true"], ["--train.optimizer", "muon"])
NO_EVALUATION = ["--data.test_datasets", "[]"]
TWO_RANKS = ["--nproc-per-node", "2"]
COMMAND_LINES: dict[str, list[str]] = {
    "full weights": [],
    "LoRA": LORA,
    "QLoRA": [*QLORA, "--train.data_parallel_mode", "none"],
    "QLoRA with noise": [*QLORA, "--lora.enable_aqn", "true"],
    "muon": [*MUON, "--train.lr_decay_style", "cosine"],
    "LoRA by muon": [*LORA, *MUON],
    "LoRA, no evaluation, clipped": [*LORA, *NO_EVALUATION, "--train.max_grad_norm", "0.5"],
    "replicated, profiled": ["--train.data_parallel_mode", "ddp", "--train.enable_profiling", "true"],
    "two ranks": [*TWO_RANKS, "--train.enable_gradient_checkpointing", "false"],
}
WITHOUT_EFFECT = {
    "full weights": {"train.muon_lr", "lora.lora_rank", "lora.quant_format", "lora.aqn_alpha", "train.wandb_project"},
    "LoRA": {"train.muon_lr", "lora.quant_format", "train.no_decay_modules norm (matches only frozen parameters)"},
    "QLoRA": {"train.muon_lr", "lora.aqn_alpha", "train.reshard_after_forward"},
    "LoRA, no evaluation, clipped": {"train.eval_steps"},
    "replicated, profiled": {"train.reshard_after_forward"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("first_hour")
    save_model(root / "base", hf_config(intermediate_size=64))
    rows = [{"input_ids": [(index + offset) % 50 for offset in range(8 + index % 5)]} for index in range(32)]
    (root / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (root / "config.yaml").write_text(BASE.format(folder=root))
    return root


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_every_command_line_runs_with_the_same_file(name: str, folder: Path, run_command) -> None:
    # Would catch an option that has no effect and ends the run, so that each kind of run needs a file of its own.
    output = folder / name.replace(" ", "_").replace(",", "")
    result = run_command(str(folder / "config.yaml"), "--train.output_dir", str(output), *COMMAND_LINES[name])
    assert result.returncode == 0, result.stderr
    records = metrics_of(output)
    assert [record["step"] for record in records if "loss" in record] == [1, 2]
    assert any("eval_loss" in record for record in records) == ("no evaluation" not in name)
    listed = [line for line in result.stderr.splitlines() if "options without effect: " in line]
    assert all(option in "\n".join(listed) for option in WITHOUT_EFFECT.get(name, ())), listed
    assert len([line for line in listed if "frozen" not in line]) == 1
    check_first_lines(name, [line for line in result.stderr.splitlines() if line not in listed])


def check_first_lines(name: str, lines: list[str]) -> None:
    """Catches a start that scrolls the facts out of sight, and lines that only their programmer can read."""
    first = next(index for index, line in enumerate(lines) if line.startswith("step 1/2 "))
    opening = lines[:first]
    assert len(opening) <= 10, opening
    assert not [line for line in opening if re.search(r"\b(None|True|False)\b|[\[{]|\w\(|\w=\w*\(", line)], opening
    facts = [
        "Model: Qwen3ForCausalLM with ",
        "Data: 32 samples, 317 tokens, 285 of them trained, in 11 rows (90.1% full) of up to 32 tokens",
        "Steps: 2 ",
        "Optimizer: ",
        "Computation: ",
        "Output: ",
    ]
    facts += (
        [" with 22,720 parameters, ", "; 4,096 in adapters are trained, on 2 q_proj, 2 k_proj, "]
        if "LoRA" in name
        else []
    )
    facts += [", quantised to nf4; "] if "QLoRA" in name else []
    facts += ["No weight decay on "] if "LoRA" not in name else []
    facts += [" on 2 ranks (CPU; fsdp2, dp_shard 2)."] if name == "two ranks" else []
    assert not [fact for fact in facts if not any(fact in line for line in opening)], opening
