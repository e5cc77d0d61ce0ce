"""Times clipping and the step of each optimizer on a model's parameters, sharded over the ranks: no forward, no data.

    uv run tools/bench_optimizers.py                                     # a tiny model, to try the tool
    uv run torchrun --nproc-per-node 4 tools/bench_optimizers.py --model qwen3-8b --param-dtype bf16

Prints a table in Markdown: medians over the steps of the slowest rank, by CUDA events where there is a GPU.
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
from xorl.core.optim import MuonOptions, OptimizerName, build_optimizer, scale_and_clip_
from xorl.core.optim.newton_schulz import orthogonalisation_flops
from xorl.core.parallel import ParallelPolicy, local_part, parallelize

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPTIMIZERS: tuple[OptimizerName, ...] = ("adamw", "anyprecision_adamw", "sgd", "muon")
WARM_UP = 2


@dataclass(frozen=True)
class Result:
    """Of one rank: milliseconds, GiB; tflops is what a rank's share of the orthogonalisation comes to in a second."""

    name: str
    clip_ms: float
    step_ms: float
    state_gib: float
    peak_gib: float
    tflops: float | None

    def row(self) -> str:
        """A row of the table."""
        tflops = "-" if self.tflops is None else f"{self.tflops:.0f}"
        return (
            f"| {self.name} | {self.clip_ms:.2f} | {self.step_ms:.2f} | {self.state_gib:.2f} | {self.peak_gib:.2f} | "
            f"{tflops} |"
        )


def build_model(hf_config: Mapping[str, object], param_dtype: torch.dtype, device: torch.device) -> Decoder:
    """The model with its parameters on `device`, sharded over all ranks. Collective."""
    spec = spec_for(hf_config)
    with torch.device("meta"):
        model = spec.build(spec.config_from_hf(hf_config)).to(param_dtype)

    def fill(module: nn.Module) -> None:
        assert module is model
        model.init_weights(0, local_part=local_part)

    mesh = Mesh(ParallelDims.resolve("fsdp2", runtime.world_size()), device.type)
    parallelize(model, mesh, ParallelPolicy(), device=device, fill=fill)
    return model


def measure(
    name: OptimizerName, model: Decoder, state_dtype: torch.dtype, num_steps: int, device: torch.device
) -> Result:
    """Steps with random gradients. Collective."""
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
    finite = torch.zeros((), device=device)
    clip_ms: list[float] = []
    step_ms: list[float] = []

    def step() -> None:
        # The attribute that torch's gradient scaler sets.
        optimizer.found_inf = finite  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()

    for _ in range(WARM_UP + num_steps):
        clip_ms.append(timed(lambda: scale_and_clip_(parameters, 1.0, 1.0), device))
        step_ms.append(timed(step, device))
    states = [state for of_one in optimizer.state.values() for state in of_one.values()]
    state_bytes = sum(on_rank(state).numel() * state.element_size() for state in states)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    clip, step_time = slowest_rank([statistics.median(times[WARM_UP:]) for times in (clip_ms, step_ms)], device)
    for parameter in parameters:
        parameter.grad = None
    tflops = None
    if name == "muon":
        shapes = [(rows, model.get_parameter(path).shape[1]) for path, counts in matrices.items() for rows in counts]
        flops = sum(orthogonalisation_flops(*shape, muon.num_steps) for shape in shapes)
        tflops = flops / runtime.world_size() / (step_time / 1e3) / 1e12
    return Result(name, clip, step_time, state_bytes / 2**30, peak / 2**30, tflops)


def on_rank(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a call, on the device where there is a GPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    dist.barrier()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def slowest_rank(values: list[float], device: torch.device) -> list[float]:
    """The largest over the ranks. Collective."""
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
            "| optimizer | clipping ms | step ms | states GiB a rank | peak GiB a rank | orthogonalisation TFLOP/s |\n"
            "|---|---|---|---|---|---|"
        )
    for name in flags.optimizers:
        result = measure(name, model, DTYPES[flags.optimizer_dtype], flags.steps, place.device)
        if place.is_main:
            print(result.row(), flush=True)
    runtime.shutdown()


if __name__ == "__main__":
    main()
