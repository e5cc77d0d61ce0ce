"""WaitWatch: warns once per run if ranks wait too long for collectives, and tells what they wait for."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from xorl.train.observe.timing import queue_copy

logger = logging.getLogger(__name__)

# Waits that take a smaller share of a step are normal.
LONG_WAIT = 0.25
# A rank counts as slow if its own part of a step takes longer than the median rank's by this factor.
SLOW_RANK = 1.2
# If a host waits for its device for a smaller share of a step, it launched the step too late.
SHORT_LEAD = 0.02
# The first steps are slow because they compile and allocate.
FIRST_STEP, EVERY_STEPS = 5, 100
# With CUDA graphs, the first steps also capture the sizes of rows.
FIRST_STEP_IN_GRAPHS = 50


class StepWaits(NamedTuple):
    """Seconds of one step on one rank.

    time: from the end of the previous step to the end of this one, on the device.
    wait: the part of `time` spent waiting for collectives.
    lead: how long the host, having launched the next step, waited for the device. 0 if the device was done first.
    """

    time: float
    wait: float
    lead: float

    @property
    def own(self) -> float:
        return self.time - self.wait


class WaitWatch:
    """Compares the waits of all ranks every `EVERY_STEPS` steps from `first_step` on, without making the host wait.

    Stops after the first warning, which the main rank logs.
    """

    def __init__(self, device: torch.device, *, is_sharded: bool, first_step: int = FIRST_STEP) -> None:
        self._device = device
        self._first_step = first_step
        self._is_sharded = is_sharded
        self._num_steps = 0
        self._on_its_way: Tensor | None = None
        self._has_warned = False

    def step(self, ended: StepWaits) -> None:
        """Record the seconds of the last step. Collective."""
        self._num_steps += 1
        if self._has_warned:
            return
        if self._on_its_way is not None:
            # The copy was queued before the end of the last step.
            ranks, self._on_its_way = [StepWaits(*row) for row in self._on_its_way.tolist()], None
            if (warning := diagnosis(ranks, is_sharded=self._is_sharded)) is not None:
                self._has_warned = True
                if dist.get_rank() == 0:
                    logger.warning("%s", warning)
        elif self._num_steps % EVERY_STEPS == self._first_step:
            mine = torch.tensor([ended], dtype=torch.float64)
            if self._device.type == "cuda":
                mine = mine.pin_memory()
            of_all = torch.empty(dist.get_world_size(), len(ended), dtype=torch.float64, device=self._device)
            dist.all_gather_into_tensor(of_all, mine.to(self._device, non_blocking=True))
            self._on_its_way = queue_copy(of_all)


def diagnosis(ranks: Sequence[StepWaits], *, is_sharded: bool) -> str | None:
    """Describe what is wrong with a step of these ranks, and what to try; None if no rank waits long.

    is_sharded: whether parameters are sharded, so that they are gathered and their gradients reduced.
    """
    longest = max(rank.wait / rank.time for rank in ranks)
    if longest < LONG_WAIT:
        return None
    slowest = max(ranks, key=lambda rank: rank.own)
    median = statistics.median_low(rank.own for rank in ranks)
    if slowest.own > SLOW_RANK * median:
        found = (
            f"rank {ranks.index(slowest)} takes {slowest.own * 1000:.0f} ms for its own part of a step and the median "
            f"rank {median * 1000:.0f} ms, so ranks wait up to {longest:.0%} of a step for it"
        )
        if slowest.lead < SHORT_LEAD * slowest.time:
            return (
                f"{found}: its GPU waits for the host to launch work; try more tokens in a micro-batch "
                "(train.micro_batch_size), train.enable_compile: true, train.enable_cuda_graphs: true with ddp, "
                "or fewer other processes on its cores"
            )
        return (
            f"{found}: check the clocks, temperature and other processes of its GPU (nvidia-smi -q -d PERFORMANCE), "
            "and whether it has more to compute"
        )
    options = "more tokens in a micro-batch (train.micro_batch_size)"
    if is_sharded:
        options += ", train.enable_full_shard: false, the other of copy_engine and nccl in train.fsdp_collectives"
    return (
        f"all ranks wait for communication, up to {longest:.0%} of a step: try {options}, or a layout that "
        "`xorl plan` finds to be faster"
    )
