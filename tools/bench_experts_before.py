"""Times a layer of experts beside what it was at an earlier commit, in turn in one process.

    uv run tools/bench_experts_before.py                       # a tiny layer, to test the tool
    uv run tools/bench_experts_before.py --shape qwen3-30b --num-tokens 8192 32768 --implementations native triton quack

The default commit is the last one without gates, biases and limits of experts. The folder of kernels is read from git's
history and imported under another name; all that is outside of it is today's. On a machine without the history, unpack
the folder on another one, and pass it:

    git archive 9480fefb packages/xorl-kernels/src/xorl/kernels/experts | tar -x -C FOLDER
    uv run tools/bench_experts_before.py --before FOLDER ...

Prints a table in Markdown: median milliseconds of forward and backward passes of both, the quotient of the medians, and
the largest difference of a result, relative to its norm.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from bench_experts import SHAPES, median_ms
from xorl.kernels import experts as now
from xorl.kernels.experts.routing import top_experts

KERNELS = Path("packages/xorl-kernels/src/xorl/kernels/experts")
NAME = "experts_before"
LAST_PLAIN = "9480fefb"


def load_before(source: str, target: Path) -> ModuleType:
    """Imports the experts of a commit, or of a folder with the project's files of it, as a package in `target`."""
    root = Path(source)
    if not root.is_dir():
        root = target / "history"
        root.mkdir()
        archive = subprocess.run(["git", "archive", source, str(KERNELS)], capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(root)], input=archive.stdout, check=True)
    package = target / NAME
    shutil.copytree(root / KERNELS, package)
    for file in package.glob("*.py"):
        text = file.read_text(encoding="utf-8").replace("xorl.kernels.experts", NAME)
        # Operators have names of their own.
        file.write_text(text.replace('"xorl::', '"xorl_before::'), encoding="utf-8")
    sys.path.insert(0, str(target))
    return importlib.import_module(NAME)


def inputs(shape: tuple[int, int, int, int], num_tokens: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """x, gate_up, down and weights, all of which are trained, and uneven routes as `bench_experts` makes them."""
    width, inner, num_experts, num_choices = shape
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=generator, device=device) * scale).to(dtype).requires_grad_()

    popularity = torch.randn(num_experts, generator=generator, device=device)
    scores = (torch.randn(num_tokens, num_experts, generator=generator, device=device) + 0.7 * popularity).softmax(-1)
    ids = top_experts(scores, num_choices)
    tensors = [
        normal(num_tokens, width),
        normal(num_experts, 2 * inner, width, scale=width**-0.5),
        normal(num_experts, width, inner, scale=inner**-0.5),
        scores.gather(-1, ids).requires_grad_(),
    ]
    return tensors, ids


def both_passes(experts: Callable[..., Tensor], tensors: list[Tensor], ids: Tensor, grad: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    out = experts(*tensors, ids, None)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


def row_of(modules: Sequence[ModuleType], name: str, options: argparse.Namespace, num_tokens: int) -> str:
    """A row of the table: `modules` are the package before and now."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = SHAPES[options.shape]
    tensors, ids = inputs(shape, num_tokens, device)
    grad = torch.randn_like(tensors[0])
    passes: list[Callable[[], list[Tensor]]] = []
    for module in modules:
        request = module.ExpertsRequest(device.type, tensors[0].dtype, *shape[:2])
        passes.append(partial(both_passes, module.EXPERTS.resolve(name, request), tensors, ids, grad))
    results = zip(*(run() for run in passes), strict=True)
    difference = max(float((new - old).float().norm() / old.float().norm()) for old, new in results)
    times: list[list[float]] = [[], []]
    for _ in range(options.turns):
        for took, run in zip(times, passes, strict=True):
            took.append(median_ms(run, device, options.rounds))
    old, new = (statistics.median(turns) for turns in times)
    return f"| {name} | {num_tokens} | {old:.3f} | {new:.3f} | {new / old:.3f} | {difference:.0e} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=LAST_PLAIN, help="a commit, or a folder with the project's files of it")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--num-tokens", nargs="+", type=int, default=[256])
    parser.add_argument("--implementations", nargs="+", choices=["native", "triton", "quack"], default=["native"])
    parser.add_argument("--turns", type=int, default=5, help="times that each is measured, in turn")
    parser.add_argument("--rounds", type=int, default=10, help="passes of a turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        modules = load_before(options.before, Path(folder)), now
        print("| experts | tokens | before, ms | now, ms | now / before | difference |")
        print("|---|---|---|---|---|---|")
        for name, num_tokens in product(options.implementations, options.num_tokens):
            print(row_of(modules, name, options, num_tokens), flush=True)


if __name__ == "__main__":
    main()
