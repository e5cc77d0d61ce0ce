"""Times quantized weights, and linear layers on them against bf16: `uv run tools/bench_weights.py`.

The shapes are those of Qwen3-8B's layers. A layer is a forward pass and the gradient of its input, as on a frozen base;
the reference is the same with a bf16 weight. Rates count the bytes read and written. Prints medians as Markdown; each
run waits for the device. Without a GPU it runs the plain torch versions at tiny sizes, whose times are meaningless.
"""

import sys

import torch
from torch import nn

from bench_fp8 import SHAPES, TINY, Row, measure, options_of, report
from xorl.core.nn import Linear
from xorl.kernels.quant import GROUP_SIZES, QuantizedWeight, QuantScheme, WeightNoise, dequantized, quant_refusal
from xorl.kernels.quant.nvfp4 import nvfp4_global_scale
from xorl.lora.quantized import QuantizedLinear, write_rows_


def weight_rows(name: str, linear: Linear, scheme: QuantScheme, repeats: int) -> list[Row]:
    """Times quantizing and dequantizing a weight, with and without noise."""
    weight = linear.weight.detach()
    device = weight.device
    num_out = weight.shape[0]
    scale = None
    if scheme.quant_format == "nvfp4":
        scale = nvfp4_global_scale(weight.abs().amax()).expand(num_out).contiguous()
    quantized: QuantizedWeight = scheme.quantize(weight, scale)
    stored = sum(part.numel() * part.element_size() for part in quantized if part is not None)
    state = torch.tensor([1, 1, 0], device=device)
    stored_as = scheme.quant_format, scheme.group_size, num_out

    def row(what: str, function: object) -> Row:
        assert callable(function)
        milliseconds = measure(function, device, repeats)
        moved = stored + 2 * weight.numel()
        return Row(name, f"{scheme.quant_format}, {what}", milliseconds, 1e-6 * moved / milliseconds, "GB/s")

    noise = WeightNoise(1.0, state)
    return [
        row("quantise", lambda: scheme.quantize(weight, scale)),
        row("dequantise", lambda: scheme.dequantize(quantized, num_out, torch.bfloat16)),
        row("dequantise, by the operator", lambda: dequantized(*quantized, *stored_as, torch.bfloat16)),
        row("dequantise with noise", lambda: scheme.dequantize(quantized, num_out, torch.bfloat16, noise)),
    ]


def layer_row(name: str, what: str, layer: Linear, num_tokens: int, repeats: int) -> Row:
    """Times a forward pass and the gradient of the input."""
    device = layer.weight.device
    x = torch.randn(num_tokens, layer.in_features, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(num_tokens, layer.out_features, device=device, dtype=torch.bfloat16)

    def step() -> None:
        x.grad = None
        layer(x).backward(grad)

    milliseconds = measure(step, device, repeats)
    tflops = 4e-9 * num_tokens * layer.in_features * layer.out_features / milliseconds
    return Row(name, f"layer, {what}", milliseconds, tflops, "TFLOP/s")


def main() -> int:
    """Parses the command line and returns the exit code."""
    options = options_of(__doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (refusal := quant_refusal("nvfp4", device)) is not None:
        print(f"error: {refusal}", file=sys.stderr)
        return 1
    on_gpu = device.type == "cuda"
    num_tokens = options.tokens or (8192 if on_gpu else 64)
    rows: list[Row] = []
    for name, (num_out, num_in) in (SHAPES if on_gpu else TINY).items():
        linear = Linear(num_in, num_out, bias=False).to(device, torch.bfloat16).requires_grad_(False)
        nn.init.normal_(linear.weight, std=0.02)
        rows.append(layer_row(name, "bf16", linear, num_tokens, options.repeats))
        for quant_format, group_size in GROUP_SIZES.items():
            # Without a GPU, the tiny shapes have rows shorter than some groups.
            scheme = QuantScheme(quant_format, group_size if on_gpu else 16)
            layer = QuantizedLinear(linear, scheme)
            write_rows_(layer, linear.weight.detach())
            rows += weight_rows(name, linear, scheme, options.repeats)
            rows.append(layer_row(name, quant_format, layer, num_tokens, options.repeats))
    machine = torch.cuda.get_device_name(device) if on_gpu else "CPU, plain versions: not representative of the kernels"
    report(rows, f"{num_tokens} tokens, {machine}, torch {torch.__version__}", options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
