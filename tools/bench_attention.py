"""Times the attention backends against their libraries called directly, forward and backward, on packed rows.

    python tools/bench_attention.py --output attention.json

prints a Markdown table and writes the results. Each backend alternates with the library it uses, and medians are
compared, because the clock of a GPU drifts. TFLOP/s count 3.5 times the forward pass (2 products forward, 5 backward)
over the pairs of tokens that attend to each other. `--tiny` runs small rows, also on a CPU, to test the tool.
"""

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from xorl.kernels.attention import ATTENTION, AttentionRequest, AttentionSpec, resolve_attention
from xorl.kernels.attention.kernel import visible_pairs
from xorl.kernels.layout import SequenceLayout

# The shape of an 8B model's attention.
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
TINY_HEADS = (4, 2, 16)
SEED = 0

Step = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """One backend on one row; seconds are medians of a forward and a backward pass.

    `direct` is the library itself, or None if the backend uses none.
    """

    case: str
    backend: str
    seconds: float
    tflops: float
    direct: str | None
    direct_seconds: float | None
    ratio: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    parser = argparse.ArgumentParser(description="Times attention backends on packed rows.")
    parser.add_argument("--backends", nargs="+", metavar="NAME", help="backends [all that can run here except eager]")
    parser.add_argument("--rounds", type=int, default=20, help="number of measurements for the median")
    parser.add_argument("--window", type=int, default=None, help="sliding window")
    parser.add_argument("--tiny", action="store_true", help="small rows, to test the tool")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        parser.error("torch finds no CUDA GPU; use --tiny to test the tool on a CPU")
    heads = TINY_HEADS if options.tiny else (NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    request = AttentionRequest(device, dtype, heads[2], options.window)
    names = options.backends or [name for name in ATTENTION.runnable(request) if name != "eager"]
    timings = []
    print("| row | backend | ms | TFLOP/s | library | ms | backend / library |")
    print("|---|---|---|---|---|---|---|")
    for case, lengths in cases(options.tiny).items():
        for name in names:
            timings.append(measure(case, lengths, name, request, heads, options.rounds))
            print(_row(timings[-1]), flush=True)
    if options.output is not None:
        record = {"environment": _environment(device), "heads": heads, "window": options.window}
        options.output.write_text(json.dumps({**record, "timings": [asdict(timing) for timing in timings]}, indent=1))
    return 0


def cases(tiny: bool) -> dict[str, list[int]]:
    """Rows of 8192 and of 32768 tokens by name: one document each, and documents of 256 to 4096 tokens."""
    shrink = 64 if tiny else 1
    rows = {}
    for total in (8192 // shrink, 32768 // shrink):
        rows[f"1 x {total}"] = [total]
        rows[f"packed {total}"] = _documents(total, 256 // shrink, 4096 // shrink)
    return rows


def _documents(total: int, shortest: int, longest: int) -> list[int]:
    """Uniformly drawn lengths that fill the row; the last document takes the rest."""
    generator = random.Random(SEED)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, generator.randint(shortest, longest)))
    return lengths


def measure(
    case: str, lengths: Sequence[int], name: str, request: AttentionRequest, heads: tuple[int, int, int], rounds: int
) -> Timing:
    """Times one backend, and the library it uses, on one row."""
    num_heads, num_kv_heads, head_dim = heads
    layout = SequenceLayout.from_lengths(lengths, device=request.device_type)
    torch.manual_seed(SEED)
    q, k, v = (
        torch.randn(sum(lengths), count, head_dim, device=request.device_type, dtype=request.dtype, requires_grad=True)
        for count in (num_heads, num_kv_heads, num_kv_heads)
    )
    spec = AttentionSpec(head_dim**-0.5, request.window)
    ours = partial(resolve_attention(name, request), q, k, v, layout, spec)
    contestants: dict[str, Callable[[], Tensor]] = {name: ours}
    direct = direct_call(name, q, k, v, layout, scale=spec.scale, window=spec.window)
    if direct is not None:
        contestants[direct[0]] = direct[1]
    grad_out = torch.randn_like(q)
    steps = {key: partial(_forward_backward, call, (q, k, v), grad_out) for key, call in contestants.items()}
    seconds = _medians(steps, request.device_type, rounds)
    flops = 3.5 * 4 * num_heads * head_dim * visible_pairs(layout.offsets, request.window)
    direct_seconds = seconds[direct[0]] if direct is not None else None
    return Timing(
        case=case,
        backend=name,
        seconds=seconds[name],
        tflops=flops / seconds[name] / 1e12,
        direct=None if direct is None else direct[0],
        direct_seconds=direct_seconds,
        ratio=None if direct_seconds is None else seconds[name] / direct_seconds,
    )


def direct_call(
    name: str, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, *, scale: float, window: int | None
) -> tuple[str, Callable[[], Tensor]] | None:
    """Returns (name, call) of the library that a backend uses, called as its documentation says."""
    cu_seqlens, longest, left = layout.cu_seqlens, layout.max_seqlen, -1 if window is None else window - 1
    if name == "sdpa" and len(layout.lengths) == 1 and window is None:
        heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
        grouped = q.shape[1] != k.shape[1]
        call = partial(F.scaled_dot_product_attention, *heads_first, is_causal=True, scale=scale, enable_gqa=grouped)
        return "F.scaled_dot_product_attention", lambda: call()[0].transpose(0, 1)
    if name == "native":
        row = q, k, v, cu_seqlens, cu_seqlens, longest, longest
        call = partial(varlen_attn, *row, scale=scale, window_size=(left, 0))
        return "torch varlen_attn", lambda: _first(call())
    libraries = {
        "flash_attention_2": ("flash_attn", {"window_size": (left, 0 if window else -1)}),
        "flash_attention_3": ("flash_attn_interface", {"window_size": (left, 0 if window else -1)}),
        "flash_attention_4": ("flash_attn.cute", {"window_size": (None, None) if window is None else (left, 0)}),
    }
    if name not in libraries:
        return None
    module, windowed = libraries[name]
    function = import_module(module).flash_attn_varlen_func
    row = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_k": longest}
    call = partial(function, q, k, v, **row, softmax_scale=scale, causal=True, **windowed)
    return f"{module}.flash_attn_varlen_func", lambda: _first(call())


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The output; some versions also return the log-sum-exp."""
    return result if isinstance(result, Tensor) else result[0]


def _forward_backward(call: Callable[[], Tensor], inputs: Sequence[Tensor], grad_out: Tensor) -> object:
    return torch.autograd.grad(call(), inputs, grad_out)


def _medians(steps: Mapping[str, Step], device: str, rounds: int) -> dict[str, float]:
    """Median seconds of each step; they alternate, after three warm-up calls."""
    for step in steps.values():
        for _ in range(3):
            step()
    seconds: dict[str, list[float]] = {key: [] for key in steps}
    clock = _seconds_on_gpu if device == "cuda" else _seconds_on_cpu
    for _ in range(rounds):
        for key, step in steps.items():
            seconds[key].append(clock(step))
    return {key: statistics.median(values) for key, values in seconds.items()}


def _seconds_on_gpu(step: Step) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # The device sleeps for about 3 ms during the launches, so that only the kernels are timed.
    torch.cuda._sleep(5_000_000)
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def _seconds_on_cpu(step: Step) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def _row(timing: Timing) -> str:
    cells = [timing.case, timing.backend, f"{timing.seconds * 1e3:.3f}", f"{timing.tflops:.3g}"]
    if timing.direct is None or timing.direct_seconds is None or timing.ratio is None:
        return f"| {' | '.join([*cells, '-', '-', '-'])} |"
    return f"| {' | '.join([*cells, timing.direct, f'{timing.direct_seconds * 1e3:.3f}', f'{timing.ratio:.3f}'])} |"


def _environment(device: str) -> dict[str, str]:
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


if __name__ == "__main__":
    sys.exit(main())
