"""Measures the rates of a GPU from which `xorl plan` predicts times, and writes them to its table in the package.

    python tools/measure_rates.py --card h200                          # one GPU: all but the links; under two minutes
    torchrun --nproc-per-node 4 tools/measure_rates.py --card h200     # the links between GPUs of one host
    uv run tools/measure_rates.py --tiny --output rates.json           # small sizes, also on a CPU, to test the tool
    uv run torchrun --nproc-per-node 2 tools/measure_rates.py --tiny --output rates.json

Only what was measured is replaced in the table, with its record: date, versions, host. Products have random operands
and run after the GPU has warmed up, since its clock falls under load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench_experts import median_ms
from link_rates import links_of, rounded, sustained_ms
from xorl.cli.bench_config import SHAPES
from xorl.config import Config, config_from_mapping
from xorl.core import runtime
from xorl.core.loss import cross_entropy
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.optim import build_optimizer
from xorl.core.parallel import ParallelModel
from xorl.kernels.attention import AttentionRequest, AttentionSpec, resolve_attention
from xorl.kernels.attention.kernel import visible_pairs
from xorl.kernels.experts import EXPERTS, ExpertsRequest
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.quant.fp8 import E4M3
from xorl.kernels.torch_private import scaled_mm
from xorl.train.bench.environment import environment
from xorl.train.model import build_model
from xorl.train.model_source import read_architecture
from xorl.train.plan.operations import Recorder
from xorl.train.plan.rates import FOLDER

MIB = 2**20
Table = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What is measured: sizes of products, tokens of documents, rows of experts, MiB of operations and collectives."""

    products: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    fp32_products: tuple[int, ...] = (1024, 8192)
    channels: tuple[int, ...] = (64, 128, 256)
    lengths: tuple[int, ...] = (512, 2048, 8192, 32768)
    tokens: int = 32768
    heads: tuple[int, int] = (16, 4)
    experts: tuple[int, int, int, int] = (2048, 768, 128, 8)
    rows: tuple[int, ...] = (128, 512, 2048)
    memory_mib: tuple[float, ...] = (1, 8, 64, 512)
    parameters: int = 1 << 30
    shape: str = "qwen3-1.7b"
    layers: int = 6
    few_tokens: int = 256
    collective_mib: tuple[float, ...] = (1, 16, 256)
    warm_up_s: float = 5.0


TINY = Sizes(
    products=(16, 32),
    fp32_products=(16, 32),
    channels=(16,),
    lengths=(16, 64),
    tokens=64,
    heads=(4, 2),
    experts=(32, 16, 4, 2),
    rows=(8, 32),
    memory_mib=(0.1, 1),
    parameters=1 << 12,
    shape="tiny",
    layers=2,
    few_tokens=16,
    collective_mib=(0.1, 1),
    warm_up_s=0.0,
)


def products_of(sizes: Sizes, device: torch.device) -> Table:
    """TFLOP/s of products [M, K] x [K, N] by M, N and K."""
    largest, dtype = sizes.products[-1], torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.randn(largest, largest, device=device).to(dtype)
    b = torch.randn(largest, largest, device=device).to(dtype)
    kinds: dict[str, Callable[[int, int, int], Callable[[], object]]] = {"bf16": partial(_product, a, b)}
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        kinds["fp8"] = partial(_fp8_product, a.to(E4M3), b.to(E4M3), torch.ones((), device=device))
    _warm_up(kinds["bf16"](largest, largest, largest), sizes.warm_up_s, device)
    tables: Table = {}
    kinds["fp32"] = partial(_product, a.float(), b.float())
    for kind, product in kinds.items():
        measured = sizes.fp32_products if kind == "fp32" else sizes.products
        tables[kind] = {
            "sizes": list(measured),
            "tflops": [
                [
                    [
                        rounded(2e-9 * m * n * k / sustained_ms(product(m, n, k), 2.0 * m * n * k, device))
                        for k in measured
                    ]
                    for n in measured
                ]
                for m in measured
            ],
        }
    return tables


def _product(a: Tensor, b: Tensor, m: int, n: int, k: int) -> Callable[[], object]:
    left, right = a[:m, :k].contiguous(), b[:n, :k].contiguous()
    return lambda: left @ right.t()


def _fp8_product(a: Tensor, b: Tensor, scale: Tensor, m: int, n: int, k: int) -> Callable[[], object]:
    left, right = a[:m, :k].contiguous(), b[:n, :k].contiguous()
    return lambda: scaled_mm(left, right.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def _warm_up(run: Callable[[], object], seconds: float, device: torch.device) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(10):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize()


def _passes_ms(
    run: Callable[[], Tensor], inputs: Sequence[Tensor], grad: Tensor, flops: float, device: torch.device
) -> tuple[float, float]:
    """Milliseconds of a forward pass of so many FLOPs, and of its backward pass.

    Many in a row, as one CUDA graph: of few, the host's launches and a clock that has not fallen yet are measured.
    """
    ms = sustained_ms(run, flops, device)
    both = sustained_ms(lambda: torch.autograd.grad(run(), inputs, grad), 3 * flops, device)
    return ms, max(both - ms, 0.05 * both)


def attention_of(sizes: Sizes, device: torch.device) -> Table:
    """TFLOP/s of the causal pairs, forward and backward, by the channels of a head and the tokens of a document."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads, kv_heads = sizes.heads
    table: Table = {}
    for channels in sizes.channels:
        attention = resolve_attention("auto", AttentionRequest(device.type, dtype, channels, None))
        q, k, v = (
            torch.randn(sizes.tokens, num, channels, device=device).to(dtype).requires_grad_()
            for num in (heads, kv_heads, kv_heads)
        )
        grad = torch.randn_like(q)
        forward: list[float] = []
        backward: list[float] = []
        for length in sizes.lengths:
            layout = SequenceLayout.from_lengths([length] * (sizes.tokens // length), device)
            flops = 4 * heads * channels * visible_pairs(layout.offsets, None)
            run = partial(attention, q, k, v, layout, AttentionSpec(channels**-0.5))
            ms, backward_ms = _passes_ms(run, (q, k, v), grad, flops, device)
            forward.append(rounded(1e-9 * flops / ms))
            backward.append(rounded(2e-9 * flops / backward_ms))
        table[str(channels)] = {"lengths": list(sizes.lengths), "forward": forward, "backward": backward}
    return table


def experts_of(sizes: Sizes, device: torch.device) -> Table:
    """TFLOP/s of a layer of experts, forward and backward, by the rows of an expert, with all that it copies."""
    width, expert_width, num_experts, active = sizes.experts
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    experts = EXPERTS.resolve("auto", ExpertsRequest(device.type, dtype, width, expert_width))
    gate_up, down = (
        (torch.randn(num_experts, *shape, device=device) * 0.02).to(dtype).requires_grad_()
        for shape in ((2 * expert_width, width), (width, expert_width))
    )
    forward: list[float] = []
    backward: list[float] = []
    for rows in sizes.rows:
        num_tokens = rows * num_experts // active
        x = torch.randn(num_tokens, width, device=device).to(dtype).requires_grad_()
        weights = torch.full((num_tokens, active), 1 / active, device=device, requires_grad=True)
        ids = (torch.arange(num_tokens, device=device)[:, None] * active + torch.arange(active, device=device)) % (
            num_experts
        )
        flops = 6 * num_tokens * active * width * expert_width
        run = partial(experts, x, gate_up, down, weights, ids)
        ms, backward_ms = _passes_ms(run, (x, gate_up, down, weights), torch.randn_like(x), flops, device)
        forward.append(rounded(1e-9 * flops / ms))
        backward.append(rounded(2e-9 * flops / backward_ms))
    return {"rows": list(sizes.rows), "forward": forward, "backward": backward}


def memory_of(sizes: Sizes, device: torch.device) -> Table:
    """GB/s that an addition reads and writes, by the MiB of its three tensors together."""
    rates: list[float] = []
    for mib in sizes.memory_mib:
        count = int(mib * MIB / 6)
        x, y, out = (torch.ones(count, dtype=torch.bfloat16, device=device) for _ in range(3))
        ms = sustained_ms(partial(torch.add, x, y, out=out), 1e12 * mib / 8, device)
        rates.append(rounded(count * 6e-6 / ms))
    return {"mib": list(sizes.memory_mib), "gbps": rates}


def adamw_of(sizes: Sizes, device: torch.device) -> float:
    """GB/s of a step of AdamW in bf16: it reads parameter, gradient and two states, and writes all but the gradient."""
    count = sizes.parameters // 8
    parameters = [torch.nn.Parameter(torch.randn(count, device=device).bfloat16().view(-1, 16)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    named = [(f"layers.{index}.weight", parameter) for index, parameter in enumerate(parameters)]
    optimizer = build_optimizer("adamw", named, lr=1e-5, weight_decay=0.01)
    ms = median_ms(optimizer.step, device, 5)
    return rounded(8 * count * 2 * 7 * 1e-6 / ms)


def host_of(sizes: Sizes, device: torch.device, *, compiled: bool) -> Table:
    """Microseconds of the host for each operation of a layer, uncompiled and compiled, with few tokens."""
    num_operations, eager = _host_layers(sizes, device, compiled=False)
    of_compiled = _host_layers(sizes, device, compiled=True)[1] if compiled else eager
    return {
        "operation_us": rounded(eager / num_operations),
        "compiled_us": rounded(of_compiled / num_operations),
    }


def _host_layers(sizes: Sizes, device: torch.device, *, compiled: bool) -> tuple[int, float]:
    """The operations of a layer's passes as it runs uncompiled, and the microseconds of the host to launch them."""
    with tempfile.TemporaryDirectory(prefix="xorl_rates_") as folder:
        whole, half = (_layers(sizes, Path(folder), device, count, compiled=compiled) for count in (sizes.layers, 1))
        operations = [_num_operations(model, sizes, device) for model in (whole, half)] if not compiled else [0, 0]
        times = [_launch_us(model, sizes, device) for model in (whole, half)]
    others = sizes.layers - 1
    return (operations[0] - operations[1]) // others, (times[0] - times[1]) / others


def _layers(
    sizes: Sizes, folder: Path, device: torch.device, count: int, *, compiled: bool, mode: str = "none"
) -> ParallelModel:
    """The first layers of a dense model in bf16, with its embedding and head."""
    (folder / "config.json").write_text((SHAPES / f"{sizes.shape}.json").read_text())
    config: Config = config_from_mapping(
        {
            "model": {"config_path": str(folder), "foundation": {"num_hidden_layers": count}},
            "data": {"datasets": [{"path": "unused"}]},
            "train": {
                "output_dir": str(folder / "output"),
                "data_parallel_mode": mode,
                "param_dtype": "bf16",
                "enable_compile": compiled,
                "enable_gradient_checkpointing": False,
            },
        }
    ).config
    architecture = read_architecture(config.model)
    train = config.train.model_copy(update={"init_device": "meta"})
    mesh = Mesh(ParallelDims(dp_shard=runtime.world_size()), device.type)
    return build_model(
        architecture, config.model, train, config.lora, mesh, device, fill_=_fill_with_zeros, alone=mode == "none"
    )


@torch.no_grad()
def _fill_with_zeros(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.zero_()


def _pass(model: ParallelModel, sizes: Sizes, device: torch.device) -> None:
    ids = torch.zeros(sizes.few_tokens, dtype=torch.int64, device=device)
    layout = SequenceLayout.from_lengths([sizes.few_tokens], device)
    output = model.forward(ids, layout, loss=lambda hidden, head: cross_entropy(hidden, head, {"labels": ids}))
    output.sum.backward()


def _num_operations(model: ParallelModel, sizes: Sizes, device: torch.device) -> int:
    with (recorder := Recorder([sizes.few_tokens])):
        _pass(model, sizes, device)
    return sum(map(len, recorder.phases))


def _launch_us(model: ParallelModel, sizes: Sizes, device: torch.device) -> float:
    """Median microseconds until a forward and a backward pass are launched."""
    times: list[float] = []
    for _ in range(8):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        _pass(model, sizes, device)
        times.append(1e6 * (time.perf_counter() - started))
    return statistics.median(times[3:])


def units_of(sizes: Sizes, device: torch.device) -> float:
    """Microseconds of the host that FSDP2 adds for each unit, uncompiled."""
    added: list[float] = []
    for mode in ("none", "fsdp2"):
        with tempfile.TemporaryDirectory(prefix="xorl_rates_") as folder:
            times = [
                _launch_us(_layers(sizes, Path(folder), device, count, compiled=False, mode=mode), sizes, device)
                for count in (sizes.layers, 1)
            ]
        added.append((times[0] - times[1]) / (sizes.layers - 1))
    return rounded(max(added[1] - added[0], 1.0))


def record() -> str:
    """Where and when: a line."""
    found = environment()
    loop = statistics.median(_loop_us() for _ in range(20))
    names = ("gpus", "driver", "cuda", "nccl", "torch", "triton", "flash-attn-4", "commit")
    shown = ", ".join(f"{name} {found[name]}" for name in names if found[name] is not None)
    return (
        f"tools/measure_rates.py, {date.today().isoformat()}: {shown}; a loop in Python of 1,000 numbers {loop:.0f} us"
    )


def _loop_us() -> float:
    started = time.perf_counter()
    total = 0
    for number in range(1000):
        total += number * number
    return 1e6 * (time.perf_counter() - started)


def one_gpu(sizes: Sizes, device: torch.device, *, compiled: bool) -> Table:
    """Everything that one GPU shows."""
    parts: Sequence[tuple[str, Callable[[], object]]] = (
        ("products", partial(products_of, sizes, device)),
        ("attention", partial(attention_of, sizes, device)),
        ("experts", partial(experts_of, sizes, device)),
        ("memory", partial(memory_of, sizes, device)),
        ("adamw_gbps", partial(adamw_of, sizes, device)),
        ("host", partial(host_of, sizes, device, compiled=compiled)),
    )
    table: Table = {"records": {"one GPU": record()}}
    for name, measure in parts:
        started = time.monotonic()
        table[name] = measure()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
    return table


def merged(table: Table, measured: Table) -> Table:
    """The table with what was measured, section by section."""
    nested = ("host", "records", "products", "attention", "links")
    return table | {
        name: {**table.get(name, {}), **value} if name in nested else value for name, value in measured.items()
    }


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", default="", help="its name for `xorl plan --gpu`, such as h200")
    parser.add_argument("--output", type=Path, help="the table to change [that of the card in the package]")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test the tool")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("torch finds no CUDA GPU; use --tiny to test the tool on a CPU")
    if not options.card and options.output is None:
        parser.error("name the table: --card or --output")
    sizes = TINY if options.tiny else Sizes()
    place = runtime.init()
    file = options.output or Path(str(FOLDER / f"{options.card}.json"))
    if place.world_size == 1:
        measured = one_gpu(sizes, place.device, compiled=place.device.type == "cuda")
    else:
        unit_us = units_of(sizes, place.device)
        measured = {"links": links_of(sizes.collective_mib, place.device), "host": {"unit_us": unit_us}}
        measured["records"] = {"several GPUs": record()}
    if place.is_main:
        table = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if place.device.type == "cuda":
            memory = torch.cuda.get_device_properties(place.device).total_memory / 2**30
            table |= {"device": torch.cuda.get_device_name(place.device), "memory_gib": rounded(memory)}
        table |= {"card": options.card or file.stem}
        file.write_text(json.dumps(merged(table, measured), indent=1) + "\n", encoding="utf-8")
        print(file)
    runtime.shutdown()


if __name__ == "__main__":
    main()
