"""Times steps with matrices, experts or rows divided among ranks, beside FSDP2: tokens/s, and the host's time.

    uv run torchrun --nproc-per-node 4 tools/bench_parallel.py                        # a tiny model, to test the tool
    torchrun --nproc-per-node 4 tools/bench_parallel.py --shape qwen3-30b-a3b --num-tokens 16384 4096 \
        --recompute --compile
    uv run tools/bench_parallel.py --shape qwen3-30b-a3b --layers 12 --num-tokens 16384 --json ep.json
    uv run tools/bench_parallel.py --shape qwen3-8b --num-tokens 8192 --ep 1 --tp 1 2 --compile
    torchrun --nproc-per-node 2 tools/bench_parallel.py --shape qwen3-1.7b --num-tokens 16384 --ep 1 \
        --ulysses 1 2 --ring 1 2 --replicas --recompute --compile

Under torchrun, all ranks train together. Without it, the others exist only in torch's fake process group: this rank
receives, as many times as there are ranks, what it would send to itself, which shows what it computes without
communication, and one rank alone stands for FSDP2. Tokens/s are then those of one micro-batch of this rank, even if it
has only its share of each matrix. Ranks that share rows need torchrun: such a row has as many tokens as one that a rank
reads alone, so each rank has fewer.

Routes are those of random weights, documents have --length tokens, and the learning rate is 0, so that all layouts have
the same loss. Layers are compiled where that is possible. Prints a table in Markdown for each size of a micro-batch:
tokens/s of all ranks (by the slowest rank's mean over steps in a row), the host's milliseconds a layer for a forward
and backward pass, GiB, and the loss. The host's time is taken with few tokens, for which it does not wait for the GPU;
with FSDP2 alone it may still wait for gathers.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from xorl.cli.bench_config import SHAPES
from xorl.config import Config, config_from_mapping
from xorl.core import runtime
from xorl.core.loss import cross_entropy
from xorl.core.mesh import Mesh
from xorl.core.nn import all_gather, dispatch
from xorl.core.nn.tensor import TensorRanks
from xorl.data import PackedBatch
from xorl.data.batch import Document, collate
from xorl.kernels import vocabulary
from xorl.train.build import build_engine
from xorl.train.engine import Engine, StepLosses
from xorl.train.model_source import read_architecture
from xorl.train.startup import parallel_dims

TINY: dict[str, object] = {"hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4, "head_dim": 16}
# Steps that are not measured.
WARMUP = 3
# Of each rank, for the time of the host.
FEW_TOKENS = 256


@dataclass(frozen=True)
class Layout:
    """Ranks that share the experts, and how tokens reach them; ranks that share each matrix; and those of each row.

    replicates: each rank holds everything but the experts (ddp) instead of shards of it (fsdp2).
    graphs: each layer is launched as CUDA graphs, under ddp or with tp alone.
    """

    ep: int
    dispatch: str
    tp: int = 1
    ulysses: int = 1
    ring: int = 1
    replicates: bool = False
    graphs: bool = False

    @property
    def num_sharing(self) -> int:
        """Ranks that train the same rows."""
        return self.tp * self.ulysses * self.ring

    def __str__(self) -> str:
        parts = [f"ep {self.ep}, {self.dispatch}"] * (self.ep > 1) + [f"tp {self.tp}"] * (self.tp > 1)
        parts += [f"ulysses {self.ulysses}"] * (self.ulysses > 1) + [f"ring {self.ring}"] * (self.ring > 1)
        parts += ["ddp"] * self.replicates + ["graphs"] * self.graphs
        return ", ".join(parts) or "fsdp2"


@dataclass(frozen=True)
class Row:
    """One layout with one size of a micro-batch; of the slowest rank."""

    layout: str
    num_tokens: int
    tokens_per_s: float
    host_ms: float
    peak_gib: float
    loss: float


def mirrored(x: Tensor, sent: Sequence[int], received: Sequence[int], group_name: str) -> Tensor:
    """In place of `all_to_all`: from each rank, what this rank, the first one, sends to itself."""
    own = x.split(list(sent))[0]
    return torch.cat([_resized(own, size) for size in received])


def _resized(rows: Tensor, size: int) -> Tensor:
    """The first `size` of the rows, repeated as often as needed."""
    if not len(rows):
        return rows.new_zeros(size, *rows.shape[1:])
    return rows.repeat(-(-size // len(rows)), *[1] * (rows.ndim - 1))[:size] if size else rows[:0]


def alone(num_ranks: int) -> None:
    """Make this process rank 0 of so many that do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    dispatch.all_to_all = mirrored
    gather, reduce = all_gather.gather, all_gather.reduce
    all_gather.gather = lambda x, num_ranks, group_name: gather(x, num_ranks, all_gather.ALONE)
    all_gather.reduce = lambda y, num_ranks, group_name: reduce(y, num_ranks, all_gather.ALONE)
    TensorRanks.gather = lambda self, x: x.repeat(self.size, 1)
    TensorRanks.scatter = lambda self, x: x.chunk(self.size)[self.group.rank]
    vocabulary.all_gather = lambda x, num_ranks, group_name: x.repeat(num_ranks, 1)


def config_of(folder: Path, layout: Layout, options: argparse.Namespace) -> Config:
    """bf16 parameters and states, sharded over the ranks that there are, unless all of these share each matrix."""
    num_ranks = dist.get_world_size()
    changes: dict[str, object] = {"num_hidden_layers": options.layers} if options.layers else {}
    if options.tiny:
        changes |= TINY | {"vocab_size": 512, "num_key_value_heads": 2, "num_experts": 16, "num_experts_per_tok": 4}
    sizes = {
        "expert_parallel_size": layout.ep,
        "tensor_parallel_size": layout.tp,
        "ulysses_parallel_size": layout.ulysses,
        "ringattn_parallel_size": layout.ring,
    }
    mode = "none" if options.tp != [1] and layout.tp == num_ranks else "ddp" if layout.replicates else "fsdp2"
    return config_from_mapping(
        {
            "model": {
                "config_path": str(folder),
                "foundation": changes,
                **({"ep_dispatch": layout.dispatch} if layout.ep > 1 else {}),
            },
            "data": {"datasets": [{"path": "unused"}]},
            "train": {
                "output_dir": str(folder / "output"),
                "data_parallel_mode": mode,
                "param_dtype": "bf16",
                "optimizer": "anyprecision_adamw",
                "enable_gradient_checkpointing": options.recompute is not None,
                **({"recompute_policy": options.recompute} if options.recompute else {}),
                "enable_compile": options.compile and layout.dispatch != "alltoall",
                "enable_cuda_graphs": layout.graphs,
                "max_grad_norm": 1.0,
                **{name: size for name, size in sizes.items() if size > 1},
            },
        }
    ).config


def batch_of(num_tokens: int, length: int, vocab_size: int, rank: int) -> PackedBatch:
    """Documents of random tokens, other ones on each rank."""
    generator = torch.Generator().manual_seed(rank)
    documents = []
    for _ in range(max(num_tokens // length, 1)):
        ids = torch.randint(vocab_size, (min(length, num_tokens),), generator=generator).numpy()
        documents.append(Document(ids, ids))
    return collate(documents, pad_to_multiple_of=128)


def slowest(value: float) -> float:
    """The largest of all ranks' values."""
    if not runtime.is_launched():
        return value
    values = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return max(values)


class Steps:
    """Steps of one layout."""

    def __init__(self, folder: Path, layout: Layout, options: argparse.Namespace, device: torch.device) -> None:
        config = config_of(folder, layout, options)
        architecture = read_architecture(config.model)
        mesh = Mesh(parallel_dims(config, dist.get_world_size()), device.type)
        self.engine: Engine = build_engine(config, architecture, mesh, device)
        self.num_layers = architecture.config.num_layers
        # Ranks that do not exist have no labels.
        self._vocab_size = architecture.config.vocab_size // (1 if runtime.is_launched() else layout.tp)
        self._device = device
        self._reads = mesh.data.rank

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        if runtime.is_launched():
            dist.barrier()

    def _run(self, batch: PackedBatch, num_steps: int) -> tuple[float, float]:
        """Seconds of a step, of several in a row, and the loss."""
        self._finish()
        started = time.perf_counter()
        steps = [self._step(batch) for _ in range(num_steps)]
        self._finish()
        loss = steps[-1].loss_sum / steps[-1].num_trained_tokens
        return (time.perf_counter() - started) / num_steps, float(loss)

    def _step(self, batch: PackedBatch) -> StepLosses:
        losses = self.engine.forward_backward([batch], cross_entropy)
        self.engine.optim_step(0.0, losses.divisor)
        return losses

    def host_seconds(self, rounds: int) -> float:
        """Seconds until a forward and backward pass of few tokens are launched."""
        batch = batch_of(FEW_TOKENS, FEW_TOKENS, self._vocab_size, self._reads)
        times: list[float] = []
        for _ in range(WARMUP + rounds):
            self._finish()
            started = time.perf_counter()
            losses = self.engine.forward_backward([batch], cross_entropy)
            times.append(time.perf_counter() - started)
            self.engine.optim_step(0.0, losses.divisor)
        return statistics.median(times[WARMUP:])

    def profile(self, num_tokens: int, length: int, file: Path) -> None:
        """Write the kernels of one pass that take the most time."""
        batch = batch_of(num_tokens, length, self._vocab_size, self._reads)
        if dist.get_rank():
            self._run(batch, 1)
            return
        with torch.profiler.profile() as recorded:
            self._run(batch, 1)
        key = f"self_{self._device.type}_time_total"
        file.write_text(recorded.key_averages().table(sort_by=key, row_limit=60, max_name_column_width=90))

    def measure(self, num_tokens: int, options: argparse.Namespace) -> tuple[float, float, float]:
        """Seconds of a step, peak GiB, and the loss."""
        batch = batch_of(num_tokens, options.length, self._vocab_size, self._reads)
        self._run(batch, WARMUP)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds, loss = self._run(batch, options.rounds)
        peak = torch.cuda.max_memory_allocated() / 2**30 if self._device.type == "cuda" else 0.0
        return seconds, peak, loss


def rows_of(folder: Path, layout: Layout, options: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """A row for each size of a micro-batch."""
    if not runtime.is_launched():
        alone(layout.ep * layout.tp)
    steps = Steps(folder, layout, options, device)
    num_readers = dist.get_world_size() // layout.num_sharing if runtime.is_launched() else 1
    host = 0.0
    for index, num_tokens in enumerate(options.num_tokens):
        seconds, peak, loss = steps.measure(num_tokens, options)
        if index == 0:
            host = slowest(steps.host_seconds(options.rounds)) * 1000 / steps.num_layers
        if options.profile is not None:
            name = f"{str(layout).replace(', ', '_').replace(' ', '')}_{num_tokens}.txt"
            steps.profile(num_tokens, options.length, options.profile / name)
        yield Row(str(layout), num_tokens, num_readers * num_tokens / slowest(seconds), host, slowest(peak), loss)
    del steps
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if not runtime.is_launched():
        dist.destroy_process_group()


def layouts_of(options: argparse.Namespace) -> Iterator[Layout]:
    """FSDP2 alone, and every way to reach experts on other ranks; each with every number that share a matrix or row."""
    for ep, *sharing in itertools.product(options.ep, options.tp, options.ulysses, options.ring):
        for name in options.dispatch if ep > 1 else ["none"]:
            layout = Layout(ep, name, *sharing)
            if runtime.is_launched() and layout.num_sharing > dist.get_world_size():
                continue
            yield layout
            if options.graphs and runtime.is_launched() and layout.tp == dist.get_world_size() > 1:
                yield replace(layout, graphs=True)
            if options.replicas and (ep > 1 or layout.num_sharing > layout.tp):
                yield replace(layout, replicates=True)
                if options.graphs:
                    yield replace(layout, replicates=True, graphs=True)


def print_tables(rows: Sequence[Row], options: argparse.Namespace, shape: str) -> None:
    """A table for each size of a micro-batch."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    num_ranks = dist.get_world_size() if runtime.is_launched() else 1
    for num_tokens in options.num_tokens:
        own = [row for row in rows if row.num_tokens == num_tokens]
        print(f"\n{shape}, {num_tokens:,} tokens a rank, {num_ranks} x {name}\n")
        print("| layout | tokens/s | of the first | host, ms a layer | peak GiB | loss |\n|---|---|---|---|---|---|")
        for row in own:
            print(
                f"| {row.layout} | {row.tokens_per_s:,.0f} | {row.tokens_per_s / own[0].tokens_per_s:.3f} | "
                f"{row.host_ms:.1f} | {row.peak_gib:.1f} | {row.loss:.5f} |"
            )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--layers", type=int, help="only so many layers; 2 of the tiny model")
    parser.add_argument("--ep", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tp", type=int, nargs="+", default=[1])
    parser.add_argument("--ulysses", type=int, nargs="+", default=[1])
    parser.add_argument("--ring", type=int, nargs="+", default=[1])
    parser.add_argument("--dispatch", nargs="+", default=["alltoall", "allgather"])
    parser.add_argument("--replicas", action="store_true", help="also with everything but the experts on each rank")
    parser.add_argument("--graphs", action="store_true", help="also replicas, and tp alone, in CUDA graphs")
    parser.add_argument(
        "--num-tokens", type=int, nargs="+", default=[512], help="of the rows that a rank reads at once"
    )
    parser.add_argument("--length", type=int, default=4096, help="of a document")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--recompute", nargs="?", const="module", choices=["module", "operation"], help="whole layers unless given"
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", type=Path, help="write the kernels of a step to this folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.tiny = options.shape == "tiny"
    options.layers = options.layers or (2 if options.tiny else None)
    options.length = min(options.length, *options.num_tokens)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if runtime.is_launched():
        device = runtime.init().device
    is_main = int(os.environ.get("RANK", "0")) == 0
    shape = "qwen3-30b-a3b" if options.tiny else options.shape
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="xorl_parallel_") as temporary:
        folder = Path(temporary)
        (folder / "config.json").write_text((SHAPES / f"{shape}.json").read_text())
        for layout in layouts_of(options):
            for row in rows_of(folder, layout, options, device):
                rows.append(row)
                if is_main:
                    print(row, flush=True)
    if is_main:
        print_tables(rows, options, options.shape)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    if runtime.is_launched():
        runtime.shutdown()


if __name__ == "__main__":
    main()
