"""Times what one rank of expert parallelism computes, without communication, beside a rank that holds all experts.

    uv run tools/bench_expert_parallel.py                                     # a tiny model, to test the tool
    uv run tools/bench_expert_parallel.py --shape qwen3-30b-a3b --layers 12 --num-tokens 16384 --json ep.json

The other ranks exist only in torch's fake process group. They are taken to hold the same tokens: this rank receives, as
many times as there are ranks, what it would send to itself. Routes are those of random weights. Prints a table in
Markdown: tokens/s of the median step, GiB, and each rank's time as a multiple of the first.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from xorl.cli.bench_config import SHAPES
from xorl.config import Config, config_from_mapping
from xorl.core.loss import cross_entropy
from xorl.core.mesh import Mesh
from xorl.core.nn import dispatch
from xorl.data.batch import Document, collate
from xorl.kernels.layout import RankGroup
from xorl.train.build import build_engine
from xorl.train.model import head_options_of
from xorl.train.model_source import read_architecture
from xorl.train.startup import parallel_dims

TINY: dict[str, object] = {"hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4, "head_dim": 16}
# Steps that are not measured.
WARMUP = 3


@dataclass(frozen=True)
class Row:
    """One size of expert parallelism."""

    ep: int
    seconds: float
    tokens_per_s: float
    peak_gib: float


def mirrored(x: Tensor, sent: Sequence[int], received: Sequence[int], group: RankGroup) -> Tensor:
    """In place of `dispatch.exchange`: from each rank, what this rank sends to itself."""
    own = x.split(list(sent))[group.rank]
    return torch.cat([_resized(own, size) for size in received])


def _resized(rows: Tensor, size: int) -> Tensor:
    """The first `size` of the rows, repeated as often as needed."""
    if not len(rows):
        return rows.new_zeros(size, *rows.shape[1:])
    return rows.repeat(-(-size // len(rows)), *[1] * (rows.ndim - 1))[:size] if size else rows[:0]


def config_of(folder: Path, ep: int, options: argparse.Namespace) -> Config:
    """bf16 parameters and states, all of them on this rank but the other ranks' experts."""
    changes: dict[str, object] = {"num_hidden_layers": options.layers}
    if options.tiny:
        changes |= TINY | {"vocab_size": 512, "num_key_value_heads": 2, "num_experts": 16, "num_experts_per_tok": 4}
    return config_from_mapping(
        {
            "model": {"config_path": str(folder), "foundation": changes},
            "data": {"datasets": [{"path": "unused"}]},
            "train": {
                "output_dir": str(folder / "output"),
                "param_dtype": "bf16",
                "optimizer": "anyprecision_adamw",
                "expert_parallel_size": ep,
                "enable_gradient_checkpointing": options.recompute,
                "max_grad_norm": 1.0,
            },
        }
    ).config


def measure(folder: Path, ep: int, options: argparse.Namespace, device: torch.device) -> Row:
    """The steps of rank 0 of `ep`."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ep)
    dispatch.exchange = mirrored
    config = config_of(folder, ep, options)
    architecture = read_architecture(config.model)
    engine = build_engine(config, architecture, Mesh(parallel_dims(config, ep), device.type), device)
    generator = torch.Generator().manual_seed(0)
    documents = []
    for _ in range(options.num_tokens // options.length):
        ids = torch.randint(architecture.config.vocab_size, (options.length,), generator=generator).numpy()
        documents.append(Document(ids, ids))
    batch = collate(documents, pad_to_multiple_of=128)
    loss_fn = partial(cross_entropy, **head_options_of(config.model, config.train))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    for _ in range(WARMUP + options.rounds):
        started = time.perf_counter()
        engine.forward_backward([batch], loss_fn)
        engine.optim_step(0.0, batch.num_tokens)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times[WARMUP:])
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    del engine
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    dist.destroy_process_group()
    return Row(ep, seconds, options.num_tokens / seconds, peak)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--ep", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--num-tokens", type=int, default=512)
    parser.add_argument("--length", type=int, help="of a document; default: min(4096, num-tokens)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.tiny = options.shape == "tiny"
    options.length = options.length or min(4096, options.num_tokens)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = "qwen3-30b-a3b" if options.tiny else options.shape
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="xorl_ep_") as temporary:
        folder = Path(temporary)
        (folder / "config.json").write_text((SHAPES / f"{shape}.json").read_text())
        for ep in options.ep:
            rows.append(measure(folder, ep, options, device))
            print(rows[-1], flush=True)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"\n{shape}, {options.layers} layers, {options.num_tokens} tokens, {name}\n")
    print("| ranks that share the experts | tokens/s | of the first | peak GiB |\n|---|---|---|---|")
    for row in rows:
        ratio = row.tokens_per_s / rows[0].tokens_per_s
        print(f"| {row.ep} | {row.tokens_per_s:,.0f} | {ratio:.3f} | {row.peak_gib:.1f} |")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
