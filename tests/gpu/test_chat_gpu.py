"""`xorl chat` on a GPU: recorded decode passes give the greedy answers of the CPU."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from tiny_models import hf_config
from tiny_runs import QUICKSTART
from workspace import ROOT
from xorl.cli.chat import app

pytestmark = pytest.mark.gpu


def test_greedy_answers_on_a_gpu_are_those_of_the_cpu(tmp_path: Path) -> None:
    # Catches weights, a cache or a precision that only a GPU has wrong.
    torch.manual_seed(0)
    config = hf_config(vocab_size=288, max_position_embeddings=256, eos_token_id=0)
    Qwen3ForCausalLM(Qwen3Config.from_dict(config)).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(QUICKSTART / name, tmp_path)
    shutil.copy(ROOT / "configs" / "local" / "chat.jinja", tmp_path / "chat_template.jinja")
    said, found = "copy AB =\nsort 31 =\n", {}
    for device, dtype in (("cpu", "fp32"), ("cuda", "fp32"), ("cuda", "bf16")):
        flags = ["--device", device, "--dtype", dtype, "--temperature", "0", "--max-tokens", "24"]
        result = CliRunner().invoke(app, [str(tmp_path), *flags], input=said)
        assert result.exit_code == 0, result.output
        assert f"{dtype} on {device}" in result.stderr
        found[device, dtype] = result.stdout
    assert found["cuda", "fp32"] == found["cpu", "fp32"]
    # bf16 rounds differently, so that later tokens may differ.
    assert found["cuda", "bf16"].strip()
