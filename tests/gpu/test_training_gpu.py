"""Training on GPUs: the command, NCCL, mixed precision, and resuming to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

CONFIG = """\
model:
  config_path: {folder}/model
data:
  datasets:
    - path: {folder}/train.jsonl
  dataset_prepared_path: {folder}/prepared
  sample_packing_sequence_len: 512
  dataloader_num_workers: 0
train:
  output_dir: {folder}/output
  gradient_accumulation_steps: 2
  max_steps: 10
  lr: 3e-3
  load_checkpoint_path: auto
  save_hf_weights: false
  log_format: structured
  use_wandb: false
"""
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


OPTIMIZERS = {
    "adamw": [],
    "muon": ["--train.optimizer", "muon"],
    "half": ["--train.optimizer", "anyprecision_adamw", "--train.param_dtype", "bf16", "--train.lr", "1e-3"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    generator = torch.Generator().manual_seed(0)
    with (folder / "train.jsonl").open("w") as file:
        for _ in range(800):
            length = int(torch.randint(2, 300, (1,), generator=generator))
            start = int(torch.randint(0, 256, (1,), generator=generator))
            file.write(json.dumps({"input_ids": [(start + 3 * i) % 256 for i in range(length)]}) + "\n")
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    return folder


def first_gpus(count: int) -> str:
    """So many of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    every = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return ",".join(every[:count])


def train(folder: Path, name: str, *arguments: str, gpus: int = 1) -> list[float]:
    """The losses of a run on `gpus` GPUs; 0 means the CPU."""
    output = folder / name
    ranks = ["--nproc-per-node", str(gpus)] if gpus > 1 else []
    command = [sys.executable, "-m", "xorl.cli.train", str(folder / "config.yaml"), *ranks, *arguments]
    result = subprocess.run(
        [*command, "--train.output_dir", str(output)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": first_gpus(gpus)},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_gpu_agrees_with_the_cpu_in_fp32(folder: Path) -> None:
    # Catches an operation that computes something else, or with less precision, on a GPU.
    fp32 = ["--train.enable_mixed_precision", "false", "--train.max_steps", "4"]
    assert train(folder, "fp32_gpu", *fp32) == pytest.approx(train(folder, "fp32_cpu", *fp32, gpus=0), rel=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "anyprecision_adamw", "muon"])
def test_resumed_run_is_the_same_to_the_bit(folder: Path, optimizer: str) -> None:
    # Catches state that a checkpoint forgets, and kernels that are not deterministic when they were asked to be.
    exact = ["--train.enable_full_determinism", "true", "--train.allow_cuda_launch_blocking", "true"]
    if optimizer != "adamw":
        exact += ["--train.optimizer", optimizer, "--train.param_dtype", "bf16"]
    straight = train(folder, f"straight_{optimizer}", *exact)
    train(folder, f"resumed_{optimizer}", *exact, "--train.max_steps", "5")
    assert train(folder, f"resumed_{optimizer}", *exact) == straight
    assert straight[-1] < straight[0]


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_gpus_agree_with_one(folder: Path, mode: str) -> None:
    # Catches gradients that are averaged, or reduced in half precision, by NCCL.
    if torch.cuda.device_count() < 2:
        pytest.skip("this host has one GPU")
    for name, options in OPTIMIZERS.items():
        options = [*options, "--train.data_parallel_mode", mode]
        one = train(folder, f"{mode}_{name}_one", "--train.gradient_accumulation_steps", "4", *options)
        two = train(folder, f"{mode}_{name}_two", *options, gpus=2)
        assert two == pytest.approx(one, rel=1e-2), name


@pytest.mark.parametrize(
    "options",
    [
        ["--train.recompute_modules", "[self_attn, mlp]"],
        ["--train.recompute_policy", "operation"],
        ["--train.recompute_policy", "auto"],
        ["--train.enable_reentrant", "true"],
        ["--train.enable_cpu_offload", "true"],
        ["--train.enable_activation_offload", "true"],
        ["--train.enable_compile", "true", "--train.recompute_policy", "operation"],
        ["--train.enable_compile", "true", "--train.enable_activation_offload", "true"],
        ["--train.enable_gradient_checkpointing", "false", "--train.enable_full_shard", "false"],
        ["--train.init_device", "cpu", "--model.attn_implementation", "sdpa"],
        ["--train.ce_mode", "eager", "--model.lm_head_fp32", "false"],
        ["--model.rmsnorm_native", "true", "--model.rope_native", "true", "--model.activation_native", "true"],
        ["--model.rmsnorm_native", "true"],
        ["--model.rope_native", "true", "--model.merge_qkv", "false"],
        ["--train.init_device", "cuda", "--model.basic_modules", "[mlp]", "--train.ckpt_manager", "torch"],
    ],
    ids=" ".join,
)
def test_options_do_not_change_what_is_trained(folder: Path, options: list[str]) -> None:
    # Catches a setting of memory or placement that changes the numbers beyond the rounding of bf16.
    reference = train(folder, "reference", "--train.load_checkpoint_path", "auto")
    name = "_".join(options).replace("/", "_")
    assert train(folder, name, *options) == pytest.approx(reference, rel=1e-2)


@pytest.mark.parametrize("option", ["enable_compile", "enable_cpu_offload", "enable_activation_offload"])
def test_resumed_run_is_the_same_whatever_saves_memory(folder: Path, option: str) -> None:
    # Catches kernels that compiled code picks by timing, and tensors that sharding to the host replaces.
    exact = ["--train.enable_full_determinism", "true", "--train.allow_cuda_launch_blocking", "true"]
    exact += [f"--train.{option}", "true"]
    straight = train(folder, f"straight_{option}", *exact)
    train(folder, f"resumed_{option}", *exact, "--train.max_steps", "5")
    assert train(folder, f"resumed_{option}", *exact) == straight
