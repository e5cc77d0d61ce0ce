"""Exposed communication: times at which the compute stream waits for a collective of data parallelism.

Patches FSDP2's `FSDPParamGroup`; a test detects changes in other versions. On a GPU, FSDP2 runs collectives on separate
streams, and the compute stream waits

- in `wait_for_unshard`, for the all-gather of the parameters it needs next,
- in `post_backward`, for the reduce-scatter of the previous unit (one at a time, to bound memory),
- at the end of the backward pass, for the reductions of every unit.

Only these waits are recorded; copies in and out of communication buffers count as compute. On a CPU, collectives block,
so all of `unshard` and `post_backward` is recorded, including copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from xorl.core.parallel.apply import ParallelModel
from xorl.core.parallel.ddp import Replicated
from xorl.core.torch_private import (
    FSDPParamGroup,
    gather_event,
    parameter_group,
    record_wait_for_reductions,
    reduction_event,
    replace_method,
)


class WaitRecorder(Protocol):
    """Receives the start and end of each wait, in stream order."""

    def begin_wait(self) -> None: ...

    def end_wait(self) -> None: ...


def record_waits(model: ParallelModel, recorder: WaitRecorder) -> None:
    """Report every wait of `model`'s forward and backward passes for collectives to `recorder`; modifies `model`.

    Under DDP, the wait starts when the last bucket is ready, because all gradients have then been computed. Its end is
    not reported: the wait lasts until backward() returns, after all buckets have been reduced. On a CPU, the sums of
    earlier buckets count as compute.
    """
    if model.mesh.loss.size == 1:
        return
    if isinstance(model.forward, Replicated):
        model.forward.on_last_bucket = recorder.begin_wait
    for group in _param_groups(model.module):
        if model.mesh.device_type == "cuda":
            _record_stream_waits(group, recorder)
        else:
            _record_blocking_calls(group, recorder)


def _param_groups(module: nn.Module) -> Iterator[FSDPParamGroup]:
    for part in module.modules():
        if (group := parameter_group(part)) is not None:
            yield group


def _record_stream_waits(group: FSDPParamGroup, recorder: WaitRecorder) -> None:
    wait_for_unshard, post_backward = group.wait_for_unshard, group.post_backward

    def recorded_wait_for_unshard() -> None:
        wait(gather_event(group))
        wait_for_unshard()

    def recorded_post_backward(*unused: object) -> None:
        wait(reduction_event(group))
        post_backward(*unused)

    def recorded(wait_for_reductions: Callable[[], None]) -> None:
        with _recorded(recorder):
            wait_for_reductions()

    def wait(event: torch.Event | None) -> None:
        # FSDP2's own wait, which follows, then returns at once.
        if event is not None:
            with _recorded(recorder):
                torch.cuda.current_stream().wait_event(event)

    replace_method(group, "wait_for_unshard", recorded_wait_for_unshard)
    replace_method(group, "post_backward", recorded_post_backward)
    record_wait_for_reductions(group, recorded)


def _record_blocking_calls(group: FSDPParamGroup, recorder: WaitRecorder) -> None:
    unshard, post_backward = group.unshard, group.post_backward

    def recorded_unshard(async_op: bool = False) -> None:
        with _recorded(recorder):
            unshard(async_op)

    def recorded_post_backward(*unused: object) -> None:
        with _recorded(recorder):
            post_backward(*unused)

    replace_method(group, "unshard", recorded_unshard)
    replace_method(group, "post_backward", recorded_post_backward)


@contextmanager
def _recorded(recorder: WaitRecorder) -> Iterator[None]:
    recorder.begin_wait()
    yield
    recorder.end_wait()
