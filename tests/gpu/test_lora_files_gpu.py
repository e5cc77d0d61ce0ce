"""Adapters trained in bf16 on GPUs: what stands in checkpoints is what PEFT and transformers compute with."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from tiny_models import hf_config

pytest.importorskip("peft", reason="adapters are verified with peft")
pytestmark = pytest.mark.gpu

CONFIG = """\
model:
  model_path: {folder}/base
data:
  datasets:
    - path: {folder}/train.jsonl
  dataset_prepared_path: {folder}/prepared
  sample_packing_sequence_len: 256
  dataloader_num_workers: 0
train:
  output_dir: {folder}/output
  max_steps: 6
  lr: 1e-2
  log_format: structured
  use_wandb: false
lora:
  enable_lora: true
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora_files")
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
    config = hf_config(**sizes, max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.05)
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(config))
    model.to(torch.bfloat16).save_pretrained(root / "base")
    with (root / "train.jsonl").open("w") as file:
        for index in range(200):
            file.write(json.dumps({"input_ids": [(index + 3 * i) % 256 for i in range(2 + index % 150)]}) + "\n")
    (root / "config.yaml").write_text(CONFIG.format(folder=root))
    return root


def xorl(command: str, *arguments: str) -> None:
    code = "from xorl.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", code, command, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def adapter_of(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "checkpoints" / "global_step_6" / "adapter_model.safetensors")


KINDS = {
    "plain": [],
    "dora": ["--lora.use_dora", "true", "--lora.use_rslora", "true", "--lora.modules_to_save", "[model.norm]"],
    "embeddings": ["--lora.lora_target_modules", "[q_proj, embed_tokens, lm_head]", "--lora.save_lora_only", "true"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_trained_in_bf16_is_what_others_load(kind: str, folder: Path) -> None:
    # Catches adapters that are rounded, gathered in bf16 or written by shards on their way from a GPU to their files.
    for gpus in range(1, min(torch.cuda.device_count(), 2) + 1):
        output = folder / f"{kind}_{gpus}"
        ranks = ["--nproc-per-node", str(gpus)] if gpus > 1 else []
        options = [*ranks, "--train.output_dir", str(output), *KINDS[kind]]
        xorl("train", str(folder / "config.yaml"), *options)
        xorl("export", str(output), "--verify", "--output", f"{output}_adapter")
        xorl("export", str(output), "--merge", "--verify", "--output", f"{output}_merged")
        xorl("export", str(output), "--merge", "--verify", "--dtype", "fp32", "--output", f"{output}_merged_fp32")
        for card in ("adapter", "merged", "merged_fp32"):
            text = Path(f"{output}_{card}/README.md").read_text()
            assert "share of the largest logit" in text


def test_adapters_are_gone_on_from_by_every_form_of_recomputation(folder: Path) -> None:
    # Catches the probe of recomputation, which builds a smaller model than the adapter is for.
    first = folder / "first"
    xorl("train", str(folder / "config.yaml"), "--train.output_dir", str(first))
    adapter = first / "checkpoints" / "global_step_6"
    further = ["--lora.adapter_path", str(adapter), "--train.recompute_policy", "auto", "--train.lr", "0"]
    xorl("train", str(folder / "config.yaml"), "--train.output_dir", str(folder / "further"), *further)
    torch.testing.assert_close(adapter_of(folder / "further"), adapter_of(first), rtol=0, atol=0)
