"""Chooses how FSDP2 gathers parameters and reduces gradients on the GPUs of one host: copy engines or NCCL.

The faster one depends on the host, so `auto` measures both, overlapped with matrix products as in training. The two
sum in different orders, so a restart keeps the choice of the first start: see `choices` and `keep_choices`.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
import torch.distributed as dist

from xorl.core.parallel.copy_engine import CopyEngineAllGather, CopyEngineReduceScatter, can_use_copy_engines

logger = logging.getLogger(__name__)

Transport = Literal["copy_engine", "nccl"]
Collectives = Literal["auto", "copy_engine", "nccl"]

# Copy engines were faster in training on every host where both were measured, and they sum in a fixed order. NCCL is
# therefore only chosen if it is faster by more than a fifth, by which repeated measurements on one host may differ.
MARGIN = 1.2
# A rank that takes this much longer than the median rank for the same products delays every step of all ranks.
SLOW_RANK = 1.2

# The measured unit is as large as a layer of a 1.7B to 3B model; the products are those of its feed-forward block.
UNIT_VALUES = 1 << 26
TOKENS, WIDTH, INNER = 8192, 2048, 12288
NUM_UNITS, PRODUCTS_PER_UNIT, ROUNDS = 6, 6, 3

# What `auto` has chosen, in this process or before a restart, by the ranks that communicate.
_chosen: dict[tuple[int, ...], Transport] = {}


@dataclass(frozen=True)
class Times:
    """Milliseconds of each rank for the same products: alone, and overlapped with each transport's communication."""

    products: Sequence[float]
    copy_engine: Sequence[float]
    nccl: Sequence[float]

    @property
    def choice(self) -> Transport:
        """The transport with the faster slowest rank; NCCL only if it is clearly faster."""
        return "nccl" if max(self.nccl) * MARGIN < max(self.copy_engine) else "copy_engine"

    @property
    def slow_rank(self) -> int | None:
        """The rank that takes much longer for products alone than the median rank, if there is one."""
        slowest = max(self.products)
        is_slow = slowest > SLOW_RANK * statistics.median_low(self.products)
        return self.products.index(slowest) if is_slow else None


def transport(group: dist.ProcessGroup, collectives: Collectives) -> Transport:
    """The transport with which the ranks of `group`, on GPUs, gather and reduce. Collective.

    "auto" measures once per set of ranks, and logs the times and the choice. Raises ValueError for "copy_engine" if
    copy engines cannot be used.
    """
    if collectives == "nccl" or group.size() == 1:
        return "nccl"
    ranks = tuple(dist.get_process_group_ranks(group))
    chosen = decided(
        collectives,
        _chosen.get(ranks),
        can_use=can_use_copy_engines(group),
        is_deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    if chosen is not None:
        return chosen
    times = measure(group)
    torch.cuda.empty_cache()
    _chosen[ranks] = times.choice
    log(times, ranks)
    return times.choice


def decided(
    collectives: Collectives, before: Transport | None, *, can_use: bool, is_deterministic: bool
) -> Transport | None:
    """The transport if it need not be measured, otherwise None.

    before: the choice of "auto" for the same ranks. can_use: whether they can use copy engines. Raises ValueError for
    "copy_engine" if not.
    """
    if not can_use:
        if collectives == "copy_engine":
            raise ValueError("collectives: copy_engine needs GPUs of one host that can access each other; use auto")
        return "nccl"
    if collectives != "auto":
        return collectives
    # A deterministic run cannot depend on measured times.
    return "copy_engine" if is_deterministic else before


def choices() -> dict[str, Transport]:
    """The choices of "auto" for groups of this rank, by their global ranks, such as "0,1,2,3"; for `keep_choices`."""
    return {",".join(map(str, ranks)): chosen for ranks, chosen in _chosen.items()}


def keep_choices(kept: Mapping[str, object]) -> None:
    """Make "auto" choose for the same ranks what it chose before a restart, without measuring.

    kept: the `choices` of all ranks, the same on every rank. Raises ValueError if it has another form.
    """
    found: dict[tuple[int, ...], Transport] = {}
    for ranks, chosen in kept.items():
        if chosen not in get_args(Transport) or not all(rank.isdecimal() for rank in ranks.split(",")):
            raise ValueError(f"kept: {ranks!r}: {chosen!r} is not a transport of ranks, such as '0,1': 'nccl'")
        found[tuple(map(int, ranks.split(",")))] = cast(Transport, chosen)
    if found:
        listed = " ".join(f"{ranks}={chosen}" for ranks, chosen in kept.items())
        logger.info("fsdp_collectives=auto chosen_by=the first start by_ranks: %s", listed)
    _chosen.update(found)


def log(times: Times, ranks: Sequence[int]) -> None:
    """Log the measured times and the choice; warn of a slow rank. `ranks` are the global ranks that were measured."""
    logger.info(
        "fsdp_collectives: %s was chosen; a layer's products took %.1f ms beside copy_engine, %.1f ms beside nccl, and "
        "%.1f to %.1f ms alone",
        times.choice,
        max(times.copy_engine),
        max(times.nccl),
        min(times.products),
        max(times.products),
    )
    if (slow := times.slow_rank) is not None:
        logger.warning(
            "rank %d takes %.1f ms for products that take the median rank %.1f ms, and every step waits for it: check "
            "its GPU's clocks, temperature and other processes (nvidia-smi -q -d PERFORMANCE)",
            ranks[slow],
            times.products[slow],
            statistics.median_low(times.products),
        )


def measure(group: dist.ProcessGroup) -> Times:
    """Time products alone and overlapped with each transport. Collective; the first call takes some seconds."""
    device, size = torch.device("cuda", torch.cuda.current_device()), group.size()
    count = UNIT_VALUES // size // 64 * 64
    gathered = torch.zeros(count * size, dtype=torch.bfloat16, device=device)
    own = gathered.view(size, -1)[group.rank()]
    gradients = torch.zeros_like(gathered)
    wide = torch.zeros(count * size, device=device)
    reduced = torch.zeros(count, device=device)
    all_gather = CopyEngineAllGather(group, device)
    reduce_scatter = CopyEngineReduceScatter(group, device, gradients.dtype)

    def by_copy_engines() -> None:
        all_gather(gathered, own, group)

    def reduce_by_copy_engines() -> None:
        reduce_scatter(reduced, gradients, group, dist.ReduceOp.SUM)

    def by_nccl() -> None:
        dist.all_gather_into_tensor(gathered, own, group=group)

    def reduce_by_nccl() -> None:
        wide.copy_(gradients)  # FSDP2 widens gradients for NCCL
        dist.reduce_scatter_tensor(reduced, wide, group=group)

    products = _Products(device)
    times = (
        _milliseconds(passes, group, device)
        for passes in (
            products.run,
            lambda: products.run(by_copy_engines, reduce_by_copy_engines),
            lambda: products.run(by_nccl, reduce_by_nccl),
        )
    )
    return Times(*times)


class _Products:
    """The products of several layers, with the layers' communication on other streams, as in FSDP2."""

    def __init__(self, device: torch.device) -> None:
        # Products of zeros would need less power and run faster. A separate generator leaves the run's random state
        # unchanged.
        generator = torch.Generator(device).manual_seed(0)
        self._x, self._weight = (
            torch.randn(size, dtype=torch.bfloat16, device=device, generator=generator)
            for size in ((TOKENS, WIDTH), (WIDTH, INNER))
        )
        self._gathering, self._reducing = (torch.cuda.Stream(device, priority=-1) for _ in range(2))

    def run(self, gather: Callable[[], None] | None = None, reduce: Callable[[], None] | None = None) -> None:
        """Queue the products of all units, each beside the gather of the next and the reduction of the previous."""
        current = torch.cuda.current_stream()
        for _ in range(NUM_UNITS):
            for stream, communicate in ((self._gathering, gather), (self._reducing, reduce)):
                # A unit is used, or its buffer refilled, only after the preceding communication.
                current.wait_stream(stream)
                stream.wait_stream(current)
                if communicate is not None:
                    with torch.cuda.stream(stream):
                        communicate()
            for _ in range(PRODUCTS_PER_UNIT):
                _ = (self._x @ self._weight) @ self._weight.t()
        current.wait_stream(self._gathering)
        current.wait_stream(self._reducing)


def _milliseconds(run: Callable[[], None], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """For each rank, the median of several runs that all ranks start together, after a warm-up run."""
    found: list[float] = []
    for _ in range(1 + ROUNDS):
        dist.barrier(group=group, device_ids=[device.index])
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    mine = torch.tensor([statistics.median(found[1:])], device=device)
    of_all = mine.new_empty(group.size())
    dist.all_gather_into_tensor(of_all, mine, group=group)
    return of_all.tolist()
