"""Adapters on GPUs: compiled, placed and offloaded they train what they train plainly; and a benchmark of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tiny_models import hf_config
from xorl.core.models import SPECS
from xorl.core.parallel.compile import compile_layers
from xorl.kernels.layout import SequenceLayout
from xorl.lora import AdapterSpec, adapter_parameters, inject

pytestmark = pytest.mark.gpu

LORA = ["--lora.enable_lora", "true", "--train.lr", "1e-2"]


@pytest.mark.parametrize(
    "options",
    [
        ["--train.enable_compile", "true", "--train.enable_gradient_checkpointing", "false"],
        ["--train.enable_compile", "true", "--train.recompute_policy", "operation"],
        ["--train.enable_reentrant", "true"],
        ["--train.recompute_policy", "auto"],
        ["--train.enable_cpu_offload", "true"],
        ["--train.enable_activation_offload", "true"],
        ["--train.fp8", "tensorwise"],
        ["--train.data_parallel_mode", "none"],
    ],
    ids=" ".join,
)
def test_options_do_not_change_what_adapters_learn(options: list[str], train) -> None:
    # Catches sums made in place that something else still reads, and a frozen base that a placement cannot take.
    reference = train("lora_reference", *LORA, "--train.load_checkpoint_path", "auto")
    assert reference[-1] < reference[0]
    assert train("lora_" + "_".join(options).replace("/", "_"), *LORA, *options) == pytest.approx(reference, rel=1e-2)


def test_dora_with_dropout_and_merges_resumes_to_the_bit(resumed_alike) -> None:
    # Catches a merge into shards in host memory, and random numbers or a state that a checkpoint forgets.
    options = ["--train.enable_cpu_offload", "true", "--lora.use_dora", "true", "--lora.lora_dropout", "0.1"]
    options += ["--lora.merge_lora_interval", "3", "--lora.reset_optimizer_on_merge", "true", *LORA]
    resumed_alike("lora", *options)


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_gpus_agree_with_one(mode: str, train, two_gpus) -> None:
    # Catches gradients of adapters that NCCL averages, or reduces in half precision.
    options = [*LORA, "--train.data_parallel_mode", mode]
    one = train(f"lora_{mode}_one", "--train.gradient_accumulation_steps", "4", *options)
    assert train(f"lora_{mode}_two", *options, gpus=2) == pytest.approx(one, rel=1e-2)


def test_compiled_gradients_are_those_of_plain_code() -> None:
    # Catches a product added in place, in inductor's code, to a tensor that is read after it.
    config = hf_config(vocab_size=512, hidden_size=256, intermediate_size=512, initializer_range=0.05)
    family = SPECS["Qwen3ForCausalLM"]
    ids = torch.randint(512, (300,), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    layout = SequenceLayout.from_lengths([200, 37, 63], ids.device)
    gradients = []
    for dtype, compiled in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        with torch.device("cuda"):
            model = family.build(family.config_from_hf({**config, "max_position_embeddings": 512}))
        model.init_weights(0)
        inject(model, AdapterSpec(rank=16, alpha=32.0, rank_pattern={"k_proj": 8}))
        generator = torch.Generator("cuda").manual_seed(1)
        for parameter in adapter_parameters(model).values():
            parameter.data.normal_(std=0.05, generator=generator)
        for parameter in model.parameters():
            parameter.data = parameter.data if parameter.requires_grad else parameter.data.to(dtype)
        model.compute_dtype = dtype
        if compiled:
            compile_layers(list(model.layers), backend="inductor", device_type="cuda")
        model(ids, layout).float().logsumexp(-1).sum().backward()
        found = adapter_parameters(model)
        gradients.append(torch.cat([found[name].grad.flatten() for name in sorted(found)]))
    exact, plain, compiled = gradients
    assert (plain - exact).norm() <= 3e-2 * exact.norm()
    assert (compiled - exact).norm() <= 3e-2 * exact.norm()


def test_adapters_are_measured_beside_peers(tmp_path: Path) -> None:
    # Catches a peer that trains all of its weights where xorl trains adapters.
    command = [sys.executable, "-m", "xorl.cli.bench", "--model", "tiny", "--seq", "1024", "--nproc-per-node", "1"]
    command += ["--peers", "transformers,transformers-liger", "--steps", "4", "--warmup", "2"]
    arguments = ["--output", str(tmp_path), "--lora.enable_lora", "true"]
    result = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["config"]["train"]["param_dtype"] == "bf16"
    for name, system in record["systems"].items():
        losses = [step["loss"] for step in system["rounds"][0]]
        assert losses == pytest.approx([6.24] * len(losses), abs=0.3), name  # log of the vocabulary
