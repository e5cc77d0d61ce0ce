"""Trains on packs of varying lengths for some minutes and reports the state of CUDA's allocator.

`uv run tools/soak_memory.py --minutes 60`: reserved memory should stop growing after the first minutes, and no
allocation should be retried. On a machine without a GPU the numbers are zero, which only tests the tool.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from xorl.core import runtime
from xorl.core.loss import cross_entropy
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.models import Decoder, spec_for
from xorl.core.nn import LayerKernels
from xorl.core.optim import build_optimizer
from xorl.core.parallel import ParallelPolicy, parallelize
from xorl.data import PackedBatch
from xorl.data.batch import Document, collate
from xorl.kernels.attention import AttentionRequest, resolve_attention
from xorl.train.engine import Engine

WARM_UP = 0.2  # fraction of the time after which reserved memory should not grow much


@dataclass(frozen=True)
class Reading:
    """The allocator at one moment. retries: how often it had to free cached memory to serve a request."""

    step: int
    minutes: float
    allocated_gib: float
    reserved_gib: float
    retries: int

    def __str__(self) -> str:
        return (
            f"step={self.step} minutes={self.minutes:.1f} peak_allocated_gib={self.allocated_gib:.2f} "
            f"reserved_gib={self.reserved_gib:.2f} retries={self.retries}"
        )


def soak(minutes: float, *, hidden_size: int, num_layers: int, num_tokens: int, readings: int = 20) -> list[Reading]:
    """Trains for `minutes` on packs of up to num_tokens tokens; reads the allocator `readings` times. Collective."""
    place = runtime.init()
    engine = _engine(place.device, hidden_size, num_layers)
    draw = random.Random(0)
    start, step, taken = time.monotonic(), 0, []
    while len(taken) < readings:
        batches = [_pack(draw, num_tokens) for _ in range(2)]
        losses = engine.forward_backward(batches, cross_entropy)
        engine.optim_step(1e-4, divisor=losses.num_trained_tokens)
        step += 1
        elapsed = (time.monotonic() - start) / 60
        if elapsed >= minutes * (len(taken) + 1) / readings:
            taken.append(_read(step, elapsed, place.device))
    return taken


def growth(readings: list[Reading]) -> float:
    """The relative growth of reserved memory from the end of the warm-up to the end."""
    early = readings[int(WARM_UP * len(readings))].reserved_gib
    return readings[-1].reserved_gib / early - 1 if early else 0.0


def _engine(device: torch.device, hidden_size: int, num_layers: int) -> Engine:
    on_gpu = device.type == "cuda"
    hf_config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // 64,
        "num_key_value_heads": hidden_size // 128,
        "head_dim": 64,
        "max_position_embeddings": 1 << 20,
        "hidden_act": "silu",
    }
    spec = spec_for(hf_config)
    config = spec.config_from_hf(hf_config)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    attention = resolve_attention("auto", AttentionRequest(device.type, dtype, config.layers[0].attention.head_dim))
    with torch.device("meta"):
        model = spec.build(config, kernels=LayerKernels(attention=attention))
    model.compute_dtype = dtype

    def fill(module: nn.Module) -> None:
        assert isinstance(module, Decoder)
        module.init_weights(0)

    mesh = Mesh(ParallelDims.resolve("fsdp2", runtime.world_size()), device.type)
    policy = ParallelPolicy(param_dtype=dtype, activation_offload_limit=0.5e9 if on_gpu else None)
    placed = parallelize(model, mesh, policy, device=device, fill=fill)
    optimizer = build_optimizer("adamw", model.named_parameters(), lr=1e-4, weight_decay=0.0)
    return Engine(placed, optimizer, device, max_grad_norm=1.0, flops=sum)


def _pack(draw: random.Random, num_tokens: int) -> PackedBatch:
    """A pack between a quarter full and full, of documents of at least 16 tokens."""
    documents, left = [], draw.randint(num_tokens // 4, num_tokens)
    while left >= 16:
        length = min(left, int(16 * (num_tokens / 16) ** draw.random()))
        ids = np.array([draw.randrange(32000) for _ in range(length)])
        documents.append(Document(ids, ids))
        left -= length
    return collate(documents, pad_to_multiple_of=128)


def _read(step: int, minutes: float, device: torch.device) -> Reading:
    if device.type != "cuda":
        return Reading(step, minutes, 0.0, 0.0, 0)
    stats = torch.cuda.memory_stats(device)
    peak, reserved = stats["allocated_bytes.all.peak"] / 2**30, stats["reserved_bytes.all.current"] / 2**30
    return Reading(step, minutes, peak, reserved, stats["num_alloc_retries"])


def main() -> int:
    """Trains, prints the readings, and returns 1 if reserved memory kept growing or allocations were retried."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--num-layers", type=int, default=16)
    parser.add_argument("--num-tokens", type=int, default=32768, help="maximum tokens of a pack")
    flags = parser.parse_args()
    readings = soak(
        flags.minutes, hidden_size=flags.hidden_size, num_layers=flags.num_layers, num_tokens=flags.num_tokens
    )
    print(*readings, sep="\n")
    print(f"growth of reserved memory after the warm-up: {growth(readings):.1%}")
    runtime.shutdown()
    return int(growth(readings) > 0.05 or readings[-1].retries > 0)


if __name__ == "__main__":
    raise SystemExit(main())
