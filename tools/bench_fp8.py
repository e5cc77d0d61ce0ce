"""Times linear layers in bf16 and in fp8, and the parts of fp8: `uv run tools/bench_fp8.py --json fp8.json`.

The shapes are those of Qwen3-8B's layers, with merged query/key/value and gate/up projections. A layer is a forward
pass and a backward pass with both gradients. Under tensorwise, weights are cast beforehand, as once per training step;
that cast is a separate line. Prints medians as Markdown; each run waits for the device. Without a GPU it runs the
emulation at tiny sizes, whose times are meaningless.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from xorl.core.nn import Linear
from xorl.core.nn.fp8 import Fp8Linear, Fp8Recipe
from xorl.kernels.quant.fp8 import (
    E4M3,
    E5M2,
    amax,
    cast_axiswise,
    cast_into_,
    cast_tensorwise_both,
    fp8_refusal,
    scaled_mm,
    transpose,
)

# (output features, input features)
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
TINY = {"gate_up": (96, 32), "down": (32, 48)}


class Row(NamedTuple):
    """One line of the result. rate is in rate_unit, or None if it is meaningless."""

    layer: str
    what: str
    milliseconds: float
    rate: float | None
    rate_unit: str


def measure(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median milliseconds of `function`, after three warm-up runs."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            began = time.perf_counter()
            function()
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def layer_rows(name: str, num_out: int, num_in: int, num_tokens: int, device: torch.device, repeats: int) -> list[Row]:
    """Times a layer forward and backward, in bf16 and with each recipe, eager and compiled."""
    linear = Linear(num_in, num_out, bias=False).to(device, torch.bfloat16)
    nn.init.normal_(linear.weight, std=0.02)
    x = torch.randn(num_tokens, num_in, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(num_tokens, num_out, device=device, dtype=torch.bfloat16)
    recipes: tuple[Fp8Recipe, ...] = ("tensorwise", "rowwise")
    layers: dict[str, Linear] = {"bf16": linear} | {recipe: Fp8Linear(linear, recipe) for recipe in recipes}
    tensorwise = layers["tensorwise"]
    assert isinstance(tensorwise, Fp8Linear)
    tensorwise.weight_fp8, _, tensorwise.weight_descale = cast_tensorwise_both(
        linear.weight.detach(), amax(linear.weight.detach()), E4M3
    )
    rows = []
    for kind, layer in layers.items():
        compiled = torch.compile(layer.forward, fullgraph=True) if device.type == "cuda" else None
        for form, forward in (("", layer.forward), (", compiled", compiled)):
            if forward is None:
                continue

            def step(forward: Callable[[Tensor], Tensor] = forward) -> None:
                x.grad = linear.weight.grad = None
                forward(x).backward(grad)

            milliseconds = measure(step, device, repeats)
            tflops = 6e-9 * num_tokens * num_in * num_out / milliseconds
            rows.append(Row(name, f"layer, {kind}{form}", milliseconds, tflops, "TFLOP/s"))
    return rows


def part_rows(name: str, num_out: int, num_in: int, num_tokens: int, device: torch.device, repeats: int) -> list[Row]:
    """Times the casts of a layer, with the bytes they read and write, and its three products."""
    x = torch.randn(num_tokens, num_in, device=device, dtype=torch.bfloat16)
    grad = torch.randn(num_tokens, num_out, device=device, dtype=torch.bfloat16)
    weight = torch.randn(num_out, num_in, device=device, dtype=torch.bfloat16)
    x_fp8, x_fp8_t, x_descale = cast_tensorwise_both(x, amax(x), E4M3)
    grad_fp8, grad_fp8_t, grad_descale = cast_tensorwise_both(grad, amax(grad), E5M2)
    weight_fp8, weight_fp8_t, weight_descale = cast_tensorwise_both(weight, amax(weight), E4M3)
    into_fp8, into_descale = torch.empty_like(weight_fp8), torch.empty_like(weight_descale)
    x_amax, grad_amax, weight_amax = amax(x), amax(grad), amax(weight)

    def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, fast: bool) -> Callable[[], Tensor]:
        return lambda: scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16, fast_accumulation=fast)

    # Bytes read and written per element.
    casts: dict[str, tuple[Callable[[], object], int]] = {
        "largest value of x": (lambda: amax(x), 2 * x.numel()),
        "largest value of x, by torch": (lambda: x.abs().amax(), 2 * x.numel()),
        "cast of x, both ways": (lambda: cast_tensorwise_both(x, x_amax, E4M3), 4 * x.numel()),
        "cast of the gradient, both ways": (lambda: cast_tensorwise_both(grad, grad_amax, E5M2), 4 * grad.numel()),
        "cast of x by row and column": (lambda: cast_axiswise(x, E4M3), 6 * x.numel()),
        "cast of the weight (once a step)": (
            lambda: cast_into_(weight, weight_amax, into_fp8, into_descale),
            3 * weight.numel(),
        ),
        "weight transposed": (lambda: transpose(weight_fp8), 2 * weight.numel()),
    }
    rows = []
    for what, (cast, num_bytes) in casts.items():
        milliseconds = measure(cast, device, repeats)
        rows.append(Row(name, what, milliseconds, 1e-6 * num_bytes / milliseconds, "GB/s"))
    products: dict[str, tuple[Tensor, Tensor, Tensor, Tensor]] = {
        "output": (x_fp8, weight_fp8, x_descale, weight_descale),
        "gradient of x": (grad_fp8, weight_fp8_t, grad_descale, weight_descale),
        "gradient of the weight": (grad_fp8_t, x_fp8_t, grad_descale, x_descale),
    }
    for what, operands in products.items():
        for fast in (True, False):
            milliseconds = measure(product(*operands, fast=fast), device, repeats)
            tflops = 2e-9 * num_tokens * num_in * num_out / milliseconds
            accumulation = "fast" if fast else "fp32"
            rows.append(Row(name, f"product, {what}, {accumulation} accumulation", milliseconds, tflops, "TFLOP/s"))
    milliseconds = measure(lambda: x @ weight.t(), device, repeats)
    rows.append(Row(name, "product, output, bf16", milliseconds, 2e-9 * x.numel() * num_out / milliseconds, "TFLOP/s"))
    return rows


def options_of(description: str | None) -> argparse.Namespace:
    """Parses the command line of a tool that prints rows: tokens (None: depends on the device), repeats and json."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, help="tokens per micro-batch [8192, or 64 without a GPU]")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, help="JSON file for the rows")
    return parser.parse_args()


def report(rows: Sequence[Row], title: str, file: Path | None) -> None:
    """Prints tables of the rows and of the total time of all layers relative to bf16; writes the rows to `file`."""
    print("\n".join([title, "", "| layer | what | ms | rate |", "|---|---|---|---|"]))
    for row in rows:
        rate = "" if row.rate is None else f"{row.rate:,.0f} {row.rate_unit}"
        print(f"| {row.layer} | {row.what} | {row.milliseconds:.3f} | {rate} |")
    sums: dict[str, float] = {}
    for row in rows:
        if row.what.startswith("layer, "):
            sums[row.what] = sums.get(row.what, 0.0) + row.milliseconds
    print("\n".join(["", "| all layers above | ms | of bf16 |", "|---|---|---|"]))
    for what, total in sums.items():
        print(f"| {what} | {total:.3f} | {sums['layer, bf16'] / total:.3f} x |")
    if file is not None:
        file.write_text(json.dumps({"title": title, "rows": [row._asdict() for row in rows]}, indent=1) + "\n")


def main() -> int:
    """Parses the command line and returns the exit code."""
    options = options_of(__doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (refusal := fp8_refusal(device)) is not None:
        print(f"error: {refusal}", file=sys.stderr)
        return 1
    on_gpu = device.type == "cuda"
    num_tokens = options.tokens or (8192 if on_gpu else 64)
    rows = []
    for name, (num_out, num_in) in (SHAPES if on_gpu else TINY).items():
        rows += layer_rows(name, num_out, num_in, num_tokens, device, options.repeats)
        rows += part_rows(name, num_out, num_in, num_tokens, device, options.repeats)
    machine = torch.cuda.get_device_name(device) if on_gpu else "CPU, emulated: not representative of fp8"
    report(rows, f"{num_tokens} tokens, {machine}, torch {torch.__version__}", options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
