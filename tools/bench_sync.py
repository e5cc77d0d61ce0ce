"""Times a sync of a model's weights to one inference server: `uv run tools/bench_sync.py`.

The trainer's model has random weights and is on the first GPU, or with torchrun sharded over one GPU per rank; the
receiving process uses the next GPU. It implements SGLang's update protocol over NCCL: it views each tensor in the
received bytes and copies it to a parameter, as a server would. `--sent-as block_fp8` sends linear layers in the format
of servers that run in fp8. `resume` is the end of the time in which the server does not generate. The times are of
whole syncs, including the creation and destruction of groups, after a warm-up sync. Prints Markdown. Without a GPU it
sends a tiny model over gloo, whose times are meaningless.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Collection
from itertools import product
from pathlib import Path

import torch
from torch import nn

from xorl.cli.bench_config import SHAPES, shapes
from xorl.core import runtime
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.models import Decoder, spec_for
from xorl.core.nn import LayerKernels
from xorl.core.parallel import ParallelModel, ParallelPolicy, parallelize
from xorl.core.runtime import Runtime
from xorl.lora.quantize import checkpoint_linears
from xorl.train.export.hf_weights import hf_groups, in_block_fp8
from xorl.train.sync import (
    ReceiverAddress,
    SyncOptions,
    SyncOutcome,
    Timeouts,
    WeightSender,
    match_sglang_nccl,
)

RECEIVER = Path(__file__).parents[1] / "tests" / "support" / "fake_sglang.py"
PARTS = ("connect", "pause", "transfer", "flush", "resume", "disconnect")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def place(shape: dict[str, object], place: Runtime, dtype: torch.dtype) -> ParallelModel:
    """Builds the model of `shape` with parameters in `dtype`, sharded if there are several ranks."""
    spec = spec_for(shape)
    mode = "none" if place.world_size == 1 else "fsdp2"
    mesh = Mesh(ParallelDims.resolve(mode, place.world_size), place.device.type)
    with torch.device("meta"):
        module = spec.build(spec.config_from_hf(shape), kernels=LayerKernels())
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)

    def fill(unfilled: nn.Module) -> None:
        assert isinstance(unfilled, Decoder)
        unfilled.init_weights(0, device=place.device)

    return parallelize(module, mesh, ParallelPolicy(data_parallel_mode=mode), device=place.device, fill=fill)


def start_receiver(device: str) -> tuple[subprocess.Popen[str], int]:
    """Starts the receiving process; returns it and its port."""
    command = [sys.executable, str(RECEIVER), "--load", "--device", device]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline().partition("=")[2])


def measure(
    model: ParallelModel,
    shape: dict[str, object],
    place: Runtime,
    port: int,
    *,
    linears: Collection[str],
    bucket_mb: int,
    repeats: int,
) -> list[SyncOutcome]:
    """Returns the outcomes of all syncs but the first, with `linears` sent in block fp8; empty except on rank 0."""
    spec = spec_for(shape)
    recipes = spec.recipes(spec.config_from_hf(shape), merge_qkv=True)
    options = SyncOptions(bucket_bytes=bucket_mb << 20, pause_mode="abort", timeouts=Timeouts(bucket_s=60.0))
    sender = WeightSender(place.device)
    outcomes: list[SyncOutcome] = []
    for _ in range(repeats + 1):
        groups = in_block_fp8(hf_groups(model, recipes, dtype=torch.bfloat16, device=place.device), linears)
        outcome = sender.send(groups, [ReceiverAddress("127.0.0.1", port)], options)
        if outcome is not None:
            assert outcome.success, outcome
            outcomes.append(outcome)
    return outcomes[1:]


def row(param_dtype: str, sent_as: str, bucket_mb: int, outcomes: list[SyncOutcome], peak_bytes: int) -> str:
    """A row of the table: medians, and the slowest sync."""
    seconds = [outcome.seconds for outcome in outcomes]
    parts = [statistics.median(outcome.timing_s[part] for outcome in outcomes) for part in PARTS]
    rate = outcomes[0].num_bytes / 1e9 / parts[PARTS.index("transfer")]
    cells = [
        param_dtype,
        sent_as,
        str(bucket_mb),
        f"{outcomes[0].num_buckets}",
        f"{outcomes[0].num_bytes / 1e9:.2f}",
        f"{statistics.median(seconds):.3f}",
        f"{max(seconds):.3f}",
        *(f"{part:.3f}" for part in parts),
        f"{rate:.0f}",
        f"{peak_bytes / 1e9:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    """Parses the command line and returns the exit code."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=shapes(), default="qwen3-8b" if on_gpu else "tiny")
    parser.add_argument("--param-dtype", nargs="+", choices=list(DTYPES), default=["bf16", "fp32"])
    parser.add_argument("--sent-as", nargs="+", choices=["bf16", "block_fp8"], default=["bf16"])
    parser.add_argument("--bucket-mb", nargs="+", type=int, default=[256, 512, 1024, 2048] if on_gpu else [1])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    match_sglang_nccl()
    place_ = runtime.init()
    if on_gpu and torch.cuda.device_count() <= place_.world_size:
        print(f"error: {place_.world_size} ranks and a receiver need one GPU each", file=sys.stderr)
        return 1
    shape: dict[str, object] = json.loads((SHAPES / f"{options.model}.json").read_text())
    receiver, port = None, 0
    if place_.is_main:
        receiver, port = start_receiver(f"cuda:{place_.world_size}" if on_gpu else "cpu")
        machine = torch.cuda.get_device_name() if on_gpu else "CPU over gloo: times are meaningless"
        title = [
            "parameters",
            "sent as",
            "bucket MB",
            "buckets",
            "GB sent",
            "seconds",
            "slowest",
            *PARTS,
            "GB/s",
            "extra GB",
        ]
        print(f"{options.model}, sent from {place_.world_size} to 1 {machine}, torch {torch.__version__}\n")
        print("| " + " | ".join(title) + " |\n|" + "---|" * len(title))
    try:
        for param_dtype in options.param_dtype:
            model = place(shape, place_, DTYPES[param_dtype])
            assert isinstance(model.module, Decoder)
            for sent_as, bucket_mb in product(options.sent_as, options.bucket_mb):
                linears = checkpoint_linears(model.module, []) if sent_as == "block_fp8" else ()
                before = 0
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                outcomes = measure(
                    model, shape, place_, port, linears=linears, bucket_mb=bucket_mb, repeats=options.repeats
                )
                peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
                if outcomes:
                    print(row(param_dtype, sent_as, bucket_mb, outcomes, peak), flush=True)
            del model
            if on_gpu:
                torch.cuda.empty_cache()
        runtime.shutdown()
    finally:
        if receiver is not None:
            receiver.kill()
            receiver.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
