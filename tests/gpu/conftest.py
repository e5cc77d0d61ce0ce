"""Fixtures of the tests on GPUs: the command on a tiny model and documents that can be learned, and a mode of torch."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from tiny_models import hf_config, write_config

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
MODEL = hf_config(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    head_dim=64,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    initializer_range=0.02,
)


@pytest.fixture
def require_memory() -> Callable[[int], None]:
    """(gib) skips the test unless so much of the GPU's memory is free, without what torch keeps in reserve."""

    def require(gib: int) -> None:
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < gib * 2**30:
            pytest.skip(f"less than {gib} GiB of GPU memory are free")

    return require


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[float]]:
    """(name, *arguments, gpus=1) -> the losses of each step of `xorl train` on so many GPUs; 0 means the CPU.

    A name that a test of the module has used before goes on from its last checkpoint.
    """
    folder = tmp_path_factory.mktemp("gpu")
    write_config(folder / "model", MODEL)
    generator = torch.Generator().manual_seed(0)
    with (folder / "train.jsonl").open("w") as file:
        for _ in range(800):
            length = int(torch.randint(2, 300, (1,), generator=generator))
            start = int(torch.randint(0, 256, (1,), generator=generator))
            file.write(json.dumps({"input_ids": [(start + 3 * i) % 256 for i in range(length)]}) + "\n")
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))

    def run(name: str, *arguments: str, gpus: int = 1) -> list[float]:
        output = folder / name
        ranks = ["--nproc-per-node", str(gpus)] if gpus > 1 else []
        command = [sys.executable, "-m", "xorl.cli.train", str(folder / "config.yaml"), *ranks, *arguments]
        result = subprocess.run(
            [*command, "--train.output_dir", str(output)],
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": first_gpus(gpus)},
        )
        assert result.returncode == 0, result.stderr[-4000:]
        records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        return [record["loss"] for record in records if "loss" in record]

    return run


@pytest.fixture
def resumed_alike(train: Callable[..., list[float]]) -> Callable[..., list[float]]:
    """(name, *arguments) -> the losses of an exact run, which one that stops after 5 steps and goes on repeats."""

    def check(name: str, *arguments: str) -> list[float]:
        exact = ("--train.enable_full_determinism", "true", "--train.allow_cuda_launch_blocking", "true", *arguments)
        straight = train(f"{name}_straight", *exact)
        train(f"{name}_resumed", *exact, "--train.max_steps", "5")
        assert train(f"{name}_resumed", *exact) == straight
        return straight

    return check


@pytest.fixture
def two_gpus() -> None:
    """Skips a test where there is one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("this host has one GPU")


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's deterministic mode, for one test."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def first_gpus(count: int) -> str:
    """So many of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    every = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return ",".join(every[:count])
