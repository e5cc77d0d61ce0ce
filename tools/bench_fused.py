"""Times each fused kernel against its plain torch version, eager and compiled, forward and backward.

    uv run tools/bench_fused.py                       # on a GPU: the shapes of an 8B model, bf16
    uv run tools/bench_fused.py --dry-run             # anywhere: tiny shapes, in Triton's interpreter, no figures

Writes a Markdown table and all results as JSON to --output, and lists the kernels that are faster than the compiled
version. All of `FUSED_KERNELS` in xorl.core.nn.kernels must be, because compiled layers use them too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from xorl.core.loss import cross_entropy
from xorl.core.nn.kernels import FusedKernel
from xorl.kernels.fused import HeadNorms, HeadShape, reference
from xorl.kernels.head import HeadWeight, LogitOptions

Function = Callable[..., Tensor | tuple[Tensor, ...]]
FORMS = ("fused", "plain", "compiled")
WARM_UP = 5
HEAD_START_CYCLES = 4_000_000  # about 2 ms
L2_BYTES = 256 * 2**20  # larger than any cache; written between calls to evict their inputs


@dataclass(frozen=True)
class Sizes:
    """T tokens, D width, F feed-forward width, V vocabulary, and heads."""

    num_tokens: int
    width: int
    hidden_width: int
    vocab_size: int
    heads: HeadShape


FULL = Sizes(8192, 4096, 12_288, 151_936, HeadShape(32, 8, 128))
TINY = Sizes(5, 16, 12, 37, HeadShape(2, 1, 4))


@dataclass(frozen=True)
class Case:
    """One function in several forms. flops counts forward and backward together, if matrix products dominate.

    `decides` names the kernel whose use in compiled layers depends on this case.
    """

    name: str
    fused: Function
    plain: Function
    leaves: tuple[Tensor, ...]
    decides: FusedKernel | None = None
    flops: float | None = None


@dataclass(frozen=True)
class Result:
    """Medians. gbs: the minimum bytes to move (inputs, outputs, gradients) over the time of both passes.

    extra_gib: peak memory of both passes beyond inputs, outputs and resulting gradients.
    """

    case: str
    form: str
    forward_ms: float
    both_ms: float
    gbs: float
    tflops: float | None
    extra_gib: float

    def row(self) -> str:
        """A row of the table."""
        tflops = "-" if self.tflops is None else f"{self.tflops:.0f}"
        return (
            f"| {self.case} | {self.form} | {self.forward_ms:.3f} | {self.both_ms:.3f} | {self.gbs:.0f} | {tflops} | "
            f"{self.extra_gib:.3f} |"
        )


def make_cases(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Every kernel, with random inputs."""
    # They import Triton, whose interpreter must be selected before.
    from xorl.kernels.fused import heads, rms_norm, swiglu  # noqa: PLC0415

    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype).requires_grad_()

    tokens, width = sizes.num_tokens, sizes.width
    x, residual, weight = randn(tokens, width), randn(tokens, width), randn(width)
    head_dim = sizes.heads.head_dim
    qkv, q_weight, k_weight = randn(tokens, sum(sizes.heads.row_counts)), randn(head_dim), randn(head_dim)
    angles = torch.randn(tokens, head_dim // 2, generator=generator, device=device)
    rope = (angles.cos(), angles.sin())

    def split(function: Function, has_norms: bool) -> Function:
        def call(qkv: Tensor, *weights: Tensor) -> Tensor | tuple[Tensor, ...]:
            return function((qkv,), sizes.heads, HeadNorms(weights[0], weights[1], 1e-6) if has_norms else None, rope)

        return call

    labels = torch.randint(sizes.vocab_size, (tokens,), generator=generator, device=device)
    head_weight = randn(sizes.vocab_size, width)

    def loss(*, whole_logits: bool) -> Function:
        def call(hidden: Tensor, head_weight: Tensor) -> Tensor:
            # The plain form in the precision that other trainers use: bf16 products, then fp32.
            targets = {"labels": labels}
            head = HeadWeight(head_weight, LogitOptions(fp32=not whole_logits, whole=whole_logits))
            return cross_entropy(hidden, head, targets).sum

        return call

    head_flops = 3 * 2.0 * tokens * width * sizes.vocab_size
    return [
        Case(
            "rms_norm",
            lambda x, w: rms_norm.add_rms_norm(x, None, w, 1e-6),
            lambda x, w: reference.add_rms_norm(x, None, w, 1e-6),
            (x, weight),
            "rms_norm",
        ),
        Case(
            "add_rms_norm",
            lambda x, r, w: rms_norm.add_rms_norm(x, r, w, 1e-6),
            lambda x, r, w: reference.add_rms_norm(x, r, w, 1e-6),
            (x, residual, weight),
            "rms_norm",
        ),
        Case("rope", split(heads.split_heads, False), split(reference.split_heads, False), (qkv,), "rope"),
        Case(
            "qk_norm_rope",
            split(heads.split_heads, True),
            split(reference.split_heads, True),
            (qkv, q_weight, k_weight),
            "rope",
        ),
        Case("swiglu", swiglu.swiglu, reference.swiglu, (randn(tokens, 2 * sizes.hidden_width),), "swiglu"),
        Case(
            "linear_cross_entropy",
            loss(whole_logits=False),
            loss(whole_logits=True),
            (x, head_weight),
            flops=head_flops,
        ),
    ]


def measure(case: Case, form: str, num_calls: int) -> Result:
    """Times one form of a case."""
    function = case.fused if form == "fused" else case.plain
    device = case.leaves[0].device
    if form == "compiled":
        torch.compiler.reset()
        # Without a GPU, timing generated code is pointless.
        backend = "inductor" if device.type == "cuda" else "aot_eager"
        function = torch.compile(function, fullgraph=True, dynamic=False, backend=backend)
    outputs = _outputs(function, case)
    cotangents = [torch.ones_like(output) for output in outputs]
    moved = sum(tensor.nbytes for tensor in (*case.leaves, *outputs))
    both_moved = 2 * moved + sum(leaf.nbytes for leaf in case.leaves)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(_outputs(function, case), case.leaves, cotangents)

    gradients = both()
    del outputs
    kept = sum(gradient.nbytes for gradient in gradients) + sum(cotangent.nbytes for cotangent in cotangents)
    del gradients
    forward_ms = _median_ms(lambda: _outputs(function, case), num_calls, device)
    both_ms = _median_ms(both, num_calls, device)
    extra = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        both()
        extra = max(torch.cuda.max_memory_allocated(device) - before - kept, 0)
    tflops = None if case.flops is None else case.flops / both_ms / 1e9
    return Result(case.name, form, forward_ms, both_ms, both_moved / both_ms / 1e6, tflops, extra / 2**30)


def _outputs(function: Function, case: Case) -> tuple[Tensor, ...]:
    outputs = function(*case.leaves)
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def _median_ms(call: Callable[[], object], num_calls: int, device: torch.device) -> float:
    times = []
    flush = torch.empty(L2_BYTES if device.type == "cuda" else 0, dtype=torch.int8, device=device)
    for index in range(min(WARM_UP, num_calls) + num_calls):
        flush.zero_()
        elapsed_ms = _elapsed_ms(call, device)
        if index >= min(WARM_UP, num_calls):
            times.append(elapsed_ms)
    return statistics.median(times)


def _elapsed_ms(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The GPU sleeps while the host launches everything; otherwise small kernels would be limited by launch overhead.
    torch.cuda._sleep(HEAD_START_CYCLES)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def faster_than_compiled(cases: list[Case], results: list[Result]) -> list[str]:
    """The kernels that are faster, forward and backward, than the compiled plain version in every case."""
    times = {(result.case, result.form): result.both_ms for result in results}
    deciding = [case for case in cases if case.decides is not None]
    lost = {case.decides for case in deciding if times[case.name, "fused"] >= times[case.name, "compiled"]}
    return sorted({case.decides for case in deciding if case.decides is not None} - lost)


def main() -> None:
    """Parses the command line, measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes in Triton's interpreter, on the CPU")
    parser.add_argument("--tokens", type=int, default=FULL.num_tokens)
    parser.add_argument("--calls", type=int, default=30, help="timed calls of each form")
    parser.add_argument("--only", nargs="+", help="names of the cases to run")
    parser.add_argument("--output", type=Path, default=Path("outputs/bench_fused"), help="folder for the two files")
    flags = parser.parse_args()
    if not flags.dry_run and not torch.cuda.is_available():
        parser.error("torch finds no GPU; use --dry-run to test the tool without one")
    if flags.dry_run and os.environ.get("TRITON_INTERPRET") != "1":
        # Triton reads the variable when it is imported, which torch may already have done.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "TRITON_INTERPRET": "1"})
    device = torch.device("cpu" if flags.dry_run else "cuda")
    sizes = TINY if flags.dry_run else replace(FULL, num_tokens=flags.tokens)
    cases = make_cases(sizes, torch.float32 if flags.dry_run else torch.bfloat16, device)
    cases = [case for case in cases if not flags.only or case.name in flags.only]
    results = [measure(case, form, 1 if flags.dry_run else flags.calls) for case in cases for form in FORMS]
    where = "CPU, interpreter: times are meaningless" if flags.dry_run else torch.cuda.get_device_name(device)
    table = [
        f"{where}, torch {torch.__version__}, {sizes}\n",
        "| case | form | forward ms | forward and backward ms | GB/s | TFLOP/s | GiB beside inputs and gradients |",
        "|---|---|---|---|---|---|---|",
        *(result.row() for result in results),
    ]
    faster = faster_than_compiled(cases, results)
    table.append(f"\nFaster than compiled: {', '.join(faster) or 'none'}.")
    print("\n".join(table))
    flags.output.mkdir(parents=True, exist_ok=True)
    (flags.output / "bench_fused.md").write_text("\n".join(table) + "\n")
    record = {"device": where, "torch": torch.__version__, "sizes": asdict(sizes), "faster_than_compiled": faster}
    record["results"] = [asdict(result) for result in results]
    (flags.output / "bench_fused.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
