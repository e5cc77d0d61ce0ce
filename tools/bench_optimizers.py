"""Times clipping and the step of each optimizer on a model's parameters, sharded over the ranks: no forward, no data.

    uv run tools/bench_optimizers.py                                     # a tiny model, to test the tool
    uv run torchrun --nproc-per-node 4 tools/bench_optimizers.py --model qwen3-8b --param-dtype bf16

Prints a Markdown table of medians over the steps of the slowest rank, timed by CUDA events if there is a GPU. Clipping
computes the norm and the scale; the step divides by the scale.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from xorl.cli.bench_config import SHAPES, shapes
from xorl.core import runtime
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.models import Decoder, spec_for
from xorl.core.optim import MuonOptions, OptimizerName, build_optimizer, gradient_scale
from xorl.core.optim.newton_schulz import orthogonalisation_flops
from xorl.core.parallel import ParallelPolicy, parallelize

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPTIMIZERS: tuple[OptimizerName, ...] = ("adamw", "anyprecision_adamw", "sgd", "muon")
WARM_UP = 2


@dataclass(frozen=True)
class Result:
    """The results of the slowest rank.

    Attributes:
        clip_ms, step_ms: time for the gradient's norm and scale, and for the step.
        host_ms: time until the host has queued both; only hidden while the device has other work.
        clip_gb_s, step_gb_s: bytes that a rank must read and write for each, in 10**9 per second; None for muon's
            step, which is not bound by memory bandwidth.
        state_gib, peak_gib: optimizer state and peak memory of a rank.
        tflops: rate of a rank's share of the orthogonalization.
    """

    name: str
    clip_ms: float
    step_ms: float
    host_ms: float
    clip_gb_s: float
    step_gb_s: float | None
    state_gib: float
    peak_gib: float
    tflops: float | None

    def row(self) -> str:
        """A row of the table."""
        step_gb_s, tflops = ("-" if number is None else f"{number:.0f}" for number in (self.step_gb_s, self.tflops))
        return (
            f"| {self.name} | {self.clip_ms:.2f} | {self.clip_gb_s:.0f} | {self.step_ms:.2f} | {step_gb_s} | "
            f"{self.host_ms:.2f} | {self.state_gib:.2f} | {self.peak_gib:.2f} | {tflops} |"
        )


def build_model(hf_config: Mapping[str, object], param_dtype: torch.dtype, device: torch.device) -> Decoder:
    """Builds the model with its parameters on `device`, sharded over all ranks. Collective."""
    spec = spec_for(hf_config)
    with torch.device("meta"):
        model = spec.build(spec.config_from_hf(hf_config)).to(param_dtype)

    def fill(module: nn.Module) -> None:
        assert module is model
        model.init_weights(0)

    mesh = Mesh(ParallelDims.resolve("fsdp2", runtime.world_size()), device.type)
    parallelize(model, mesh, ParallelPolicy(), device=device, fill=fill)
    return model


def measure(
    name: OptimizerName, model: Decoder, state_dtype: torch.dtype, num_steps: int, device: torch.device
) -> Result:
    """Times steps with random gradients. Collective."""
    parameters = list(model.parameters())
    matrices = model.layer_matrices()
    muon = MuonOptions(matrices, lr=1e-3)
    optimizer = build_optimizer(
        name, model.named_parameters(), lr=1e-4, weight_decay=0.1, state_dtype=state_dtype, muon=muon
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
        on_rank(parameter.grad).normal_()
    times: list[tuple[float, ...]] = []

    def clip() -> None:
        # The engine passes the scale to the optimizer in these two attributes.
        norm, optimizer.grad_scale = gradient_scale(parameters, 1.0, 1.0)  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.found_inf = (~torch.isfinite(norm)).float()  # pyright: ignore[reportAttributeAccessIssue]

    for _ in range(WARM_UP + num_steps):
        (clip_ms, clip_host_ms), (step_ms, step_host_ms) = timed(clip, device), timed(optimizer.step, device)
        times.append((clip_ms, step_ms, clip_host_ms + step_host_ms))
    states = [state for of_one in optimizer.state.values() for state in of_one.values()]
    state_bytes = sum(size_in_bytes(state) for state in states)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    medians = [statistics.median(column) for column in zip(*times[WARM_UP:], strict=True)]
    clip_time, step_time, host_time = slowest_rank(medians, device)
    grad_bytes = sum(size_in_bytes(parameter.grad) for parameter in parameters if parameter.grad is not None)
    # Gradients are read; parameters and states are read and written.
    step_bytes = grad_bytes + 2 * (sum(size_in_bytes(parameter) for parameter in parameters) + state_bytes)
    for parameter in parameters:
        parameter.grad = None
    tflops = None
    if name == "muon":
        shapes = [(rows, model.get_parameter(path).shape[1]) for path, counts in matrices.items() for rows in counts]
        flops = sum(orthogonalisation_flops(*shape, muon.num_steps) for shape in shapes)
        tflops = flops / runtime.world_size() / (step_time / 1e3) / 1e12
    return Result(
        name,
        clip_time,
        step_time,
        host_time,
        clip_gb_s=grad_bytes / clip_time / 1e6,
        step_gb_s=None if name == "muon" else step_bytes / step_time / 1e6,
        state_gib=state_bytes / 2**30,
        peak_gib=peak / 2**30,
        tflops=tflops,
    )


def size_in_bytes(tensor: Tensor) -> int:
    """The bytes of this rank's part."""
    return on_rank(tensor).numel() * tensor.element_size()


def on_rank(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def timed(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Milliseconds of a call on the device (if there is a GPU), and until it returned on the host."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        passed_ms = (time.perf_counter() - start) * 1e3
        return passed_ms, passed_ms
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    begin.record()
    call()
    end.record()
    host_ms = (time.perf_counter() - start) * 1e3
    end.synchronize()
    return begin.elapsed_time(end), host_ms


def slowest_rank(values: list[float], device: torch.device) -> list[float]:
    """The maximum over the ranks. Collective."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def main() -> None:
    """Parses the command line, measures, and prints on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=shapes(), help="a shape of `xorl bench`")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS)
    parser.add_argument("--param-dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--optimizer-dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--steps", type=int, default=5)
    flags = parser.parse_args()
    place = runtime.init()
    hf_config = json.loads((SHAPES / f"{flags.model}.json").read_text())
    model = build_model(hf_config, DTYPES[flags.param_dtype], place.device)
    if place.is_main:
        count = sum(parameter.numel() for parameter in model.parameters())
        where = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else "CPU"
        print(
            f"{count:,} {flags.param_dtype} parameters on {place.world_size} x {where}, torch {torch.__version__}\n\n"
            "| optimizer | clipping ms | GB/s | step ms | GB/s | host ms | states GiB a rank | peak GiB a rank | "
            "orthogonalisation TFLOP/s |\n|---|---|---|---|---|---|---|---|---|"
        )
    for name in flags.optimizers:
        result = measure(name, model, DTYPES[flags.optimizer_dtype], flags.steps, place.device)
        if place.is_main:
            print(result.row(), flush=True)
    runtime.shutdown()


if __name__ == "__main__":
    main()
