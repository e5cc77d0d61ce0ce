"""Profiler: runs the torch profiler over a range of steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from xorl.config.local import TrainConfig
from xorl.core.runtime import Runtime

logger = logging.getLogger(__name__)


@dataclass
class Profiler:
    """Records steps `start_step` (inclusive) to `end_step` (exclusive), counted from 1, as a Chrome trace.

    A context manager around the training loop; call `step(n)` after step n.

    enabled: whether this rank records. steps_done: the step that the run resumes from; if it is within the range, only
    the rest is recorded. receive: called with the profile, instead of writing a file to `trace_dir`. A file that cannot
    be written causes a warning and does not end the run.
    """

    enabled: bool
    start_step: int
    end_step: int
    trace_dir: Path
    rank: int
    steps_done: int = 0
    record_shapes: bool = True
    profile_memory: bool = True
    with_stack: bool = True
    receive: Callable[[profile], object] | None = None
    _profile: profile | None = field(default=None, init=False)
    _first_recorded: int = field(default=0, init=False)
    _last_step: int = field(default=0, init=False)

    def __enter__(self) -> Profiler:
        self._begin_if_due(self.steps_done + 1)
        return self

    def step(self, step: int) -> None:
        """Start or stop recording, if due after `step`."""
        self._last_step = step
        if self._profile is not None and step + 1 >= self.end_step:
            self._end()
        self._begin_if_due(step + 1)

    def __exit__(self, *_: object) -> None:
        if self._profile is not None:
            self._end()

    def _begin_if_due(self, step: int) -> None:
        if not self.enabled or self._profile is not None or not self.start_step <= step < self.end_step:
            return
        self._first_recorded = step
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        else:
            # Without a GPU, torch's profiler would log an error for that; 5 is above all its levels.
            os.environ.setdefault("KINETO_LOG_LEVEL", "5")
        self._profile = profile(
            activities=activities,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            acc_events=True,  # otherwise torch warns that only one cycle is kept; there is only one
        )
        _wait_for_gpu()
        self._profile.start()

    def _end(self) -> None:
        assert self._profile is not None
        recorded, self._profile = self._profile, None
        _wait_for_gpu()
        recorded.stop()
        if self.receive is not None:
            self.receive(recorded)
            return
        first, last = self._first_recorded, max(self._first_recorded, self._last_step)
        steps = f"step_{first}" if first == last else f"steps_{first}-{last}"
        path = self.trace_dir / f"rank{self.rank}_{steps}.json.gz"
        try:
            self.trace_dir.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))
        except OSError as error:
            logger.warning("profile=%s cannot be written: %s; training continues", path, error)
        else:
            logger.info("profile=%s", path)


def build_profiler(train: TrainConfig, runtime: Runtime, start_step: int, num_steps: int) -> Profiler:
    """The profiler of a run, enabled on the ranks selected by the options."""
    if train.enable_profiling and train.profile_start_step > num_steps:
        logger.warning(
            "train.profile_start_step: %d, but the run ends at step=%d: nothing will be recorded",
            train.profile_start_step,
            num_steps,
        )
    return Profiler(
        enabled=train.enable_profiling and (runtime.is_main or not train.profile_rank0_only),
        steps_done=start_step,
        start_step=train.profile_start_step,
        end_step=train.profile_end_step,
        trace_dir=Path(train.profile_trace_dir),
        rank=runtime.rank,
        record_shapes=train.profile_record_shapes,
        profile_memory=train.profile_profile_memory,
        with_stack=train.profile_with_stack,
    )


def _wait_for_gpu() -> None:
    # The host runs ahead of the GPU: without this, work of the previous step would be recorded.
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
