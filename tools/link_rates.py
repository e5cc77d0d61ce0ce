"""Measures the links between GPUs of one host, for tools/measure_rates.py: rates of collectives, and what they cost
products that run beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench_experts import median_ms
from xorl.core.parallel import collectives as transports
from xorl.core.parallel.copy_engine import CopyEngineAllGather, CopyEngineReduceScatter, can_use_copy_engines

MIB = 2**20
Table = dict[str, Any]


def links_of(collective_mib: Sequence[float], device: torch.device) -> Table:
    """GB/s that reach a rank in each collective, by the number of ranks and the MiB of all ranks together."""
    world = dist.get_world_size()
    counts = [count for count in (2, 4, 8) if count < world and world % count == 0] + [world]
    by_ranks: Table = {}
    for count in counts:
        groups = [dist.new_group(list(range(first, first + count))) for first in range(0, world, count)]
        group = groups[dist.get_rank() // count]
        assert isinstance(group, dist.ProcessGroup)
        for name, of_mib in _collectives(group, device).items():
            rates: list[float] = []
            for mib in collective_mib:
                num_bytes = int(mib * MIB) // (2 * count) * 2 * count
                ms = _slowest(_in_a_row_ms(of_mib(num_bytes), device), device)
                rates.append(rounded(num_bytes * (count - 1) / count * 1e-6 / ms))
            by_ranks.setdefault(name, {})[str(count)] = {"mib": list(collective_mib), "gbps": rates}
    return {"by_ranks": by_ranks, "beside_products": _beside_products(device)}


def _collectives(group: dist.ProcessGroup, device: torch.device) -> dict[str, Callable[[int], Callable[[], object]]]:
    """Collectives of the bytes of all ranks together, in bf16."""
    count, dtype = group.size(), torch.bfloat16

    def tensors(num_bytes: int, *, whole_type: torch.dtype = dtype) -> tuple[Tensor, Tensor]:
        values = num_bytes // whole_type.itemsize // count * count
        whole = torch.zeros(values, dtype=whole_type, device=device)
        return whole, torch.zeros(values // count, dtype=whole_type, device=device)

    def all_gather(num_bytes: int) -> Callable[[], object]:
        whole, part = tensors(num_bytes)
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)

    def reduce_scatter(num_bytes: int) -> Callable[[], object]:
        whole, part = tensors(num_bytes)
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)

    def all_reduce(num_bytes: int) -> Callable[[], object]:
        whole, _ = tensors(num_bytes)
        return lambda: dist.all_reduce(whole, group=group)

    def all_to_all(num_bytes: int) -> Callable[[], object]:
        whole, _ = tensors(num_bytes)
        received = torch.zeros_like(whole)
        return lambda: dist.all_to_all_single(received, whole, group=group)

    def send(num_bytes: int) -> Callable[[], object]:
        whole, _ = tensors(num_bytes)
        received = torch.zeros_like(whole)
        ranks = dist.get_process_group_ranks(group)
        index = ranks.index(dist.get_rank())
        following, previous = ranks[(index + 1) % count], ranks[index - 1]

        def run() -> None:
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, whole, following, group),
                    dist.P2POp(dist.irecv, received, previous, group),
                ]
            )
            for work in works:
                work.wait()

        return run

    found = {
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_reduce": all_reduce,
        "all_to_all": all_to_all,
        "send": send,
    }
    if device.type == "cuda" and can_use_copy_engines(group):
        engines = CopyEngineAllGather(group, device), CopyEngineReduceScatter(group, device, dtype)

        def engine_gather(num_bytes: int) -> Callable[[], object]:
            whole, _ = tensors(num_bytes)
            own = whole.view(count, -1)[group.rank()]
            return lambda: engines[0](whole, own, group)

        def engine_reduce(num_bytes: int) -> Callable[[], object]:
            whole, _ = tensors(num_bytes)
            reduced = torch.zeros(whole.numel() // count, device=device)
            return lambda: engines[1](reduced, whole, group, dist.ReduceOp.SUM)

        found |= {"engine_gather": engine_gather, "engine_reduce": engine_reduce}
    return found


def _beside_products(device: torch.device) -> dict[str, float]:
    """The share of the time of gathers and reductions that products beside them lose, by transport."""
    if device.type != "cuda":
        return {"nccl": 1.0, "copy_engine": 1.0}
    group = dist.group.WORLD
    assert group is not None
    values = transports.UNIT_VALUES
    times, named = transports.measure(group), _collectives(group, device)
    shares: dict[str, float] = {}
    pairs = {"nccl": ("all_gather", "reduce_scatter", 2), "copy_engine": ("engine_gather", "engine_reduce", 1)}
    for transport, (gather, reduce, widening) in pairs.items():
        if gather not in named:
            shares[transport] = 1.0
            continue
        alone = _in_a_row_ms(named[gather](2 * values), device)
        alone += _in_a_row_ms(named[reduce](2 * values * widening), device)
        added = max(getattr(times, transport)) - max(times.products)
        shares[transport] = rounded(min(max(added / (transports.NUM_UNITS * alone), 0.0), 2.0))
    return shares


def _slowest(ms: float, device: torch.device) -> float:
    value = torch.tensor(ms, dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def sustained_ms(run: Callable[[], object], flops: float, device: torch.device, *, in_graph: bool = True) -> float:
    """Milliseconds of a run, over as many in a row as take 20 ms at 500 TFLOP/s, from 4 to 200.

    in_graph: launched as one CUDA graph, so that the host's launches do not count.
    """
    rounds = max(4, min(200, int(1e13 / flops))) if device.type == "cuda" else 2
    if device.type != "cuda":
        return median_ms(run, device, rounds)

    def several() -> None:
        for _ in range(rounds):
            run()

    run()
    launch = several
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            several()
        launch = graph.replay
        launch()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    launch()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / rounds


def _in_a_row_ms(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a collective, over 20 in a row."""
    return sustained_ms(run, 1e13 / 20, device, in_graph=False)


def rounded(value: float) -> float:
    """Four digits, which is more than repeated measurements share."""
    return float(f"{value:.4g}")
