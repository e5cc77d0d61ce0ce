"""Exposed communication: times at which the compute stream waits for a collective of data parallelism.

Patches FSDP2's `FSDPParamGroup` of torch 2.11; a test detects changes in other versions. On a GPU, FSDP2 runs
collectives on separate streams, and the compute stream waits

- in `wait_for_unshard`, for the all-gather of the parameters it needs next,
- in `post_backward`, for the reduce-scatter of the previous unit (one at a time, to bound memory),
- in `_wait_for_post_backward`, at the end of the backward pass, for the reductions of every unit.

Only these waits are recorded; copies in and out of communication buffers count as compute. On a CPU, collectives block,
so all of `unshard` and `post_backward` is recorded, including copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from xorl.core.parallel.apply import ParallelModel
from xorl.core.parallel.ddp import Replicated


class WaitRecorder(Protocol):
    """Receives the start and end of each wait, in stream order."""

    def begin_wait(self) -> None: ...

    def end_wait(self) -> None: ...


def record_waits(model: ParallelModel, recorder: WaitRecorder) -> None:
    """Report every wait of `model`'s forward and backward passes for collectives to `recorder`; modifies `model`.

    Under DDP, the wait starts when the last bucket is ready, because all gradients have then been computed. Its end is
    not reported: the wait lasts until backward() returns, after all buckets have been reduced.
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
        group = part._get_fsdp_state()._fsdp_param_group if isinstance(part, FSDPModule) else None
        if group is not None:
            yield group


def _record_stream_waits(group: FSDPParamGroup, recorder: WaitRecorder) -> None:
    # FSDP2 looks these methods up on the instance, so instance attributes override them.
    wait_for_unshard, post_backward = group.wait_for_unshard, group.post_backward
    wait_for_reductions = group._wait_for_post_backward
    is_trained = any(parameter.sharded_param.requires_grad for parameter in group.fsdp_params)

    def recorded_wait_for_unshard() -> None:
        gathered = group._all_gather_result
        if gathered is not None and gathered.all_gather_event is not None:
            _wait(gathered.all_gather_event)
        wait_for_unshard()

    def recorded_post_backward(*unused: object) -> None:
        reduction = group.comm_ctx.reduce_scatter_state
        # If there are gradients to reduce, post_backward waits for this event before it queues any work.
        if is_trained and group.reduce_grads and reduction is not None and reduction.event is not None:
            _wait(reduction.event)
        post_backward(*unused)

    def recorded_wait_for_reductions() -> None:
        if group._post_reduce_event is None and group._all_reduce_state is None:
            return
        with _recorded(recorder):
            wait_for_reductions()

    def _wait(event: torch.Event) -> None:
        # FSDP2's own wait, which follows, then returns at once.
        with _recorded(recorder):
            torch.cuda.current_stream().wait_event(event)

    _replace(group, "wait_for_unshard", recorded_wait_for_unshard)
    _replace(group, "post_backward", recorded_post_backward)
    _replace(group, "_wait_for_post_backward", recorded_wait_for_reductions)


def _record_blocking_calls(group: FSDPParamGroup, recorder: WaitRecorder) -> None:
    unshard, post_backward = group.unshard, group.post_backward

    def recorded_unshard(async_op: bool = False) -> None:
        with _recorded(recorder):
            unshard(async_op)

    def recorded_post_backward(*unused: object) -> None:
        with _recorded(recorder):
            post_backward(*unused)

    _replace(group, "unshard", recorded_unshard)
    _replace(group, "post_backward", recorded_post_backward)


@contextmanager
def _recorded(recorder: WaitRecorder) -> Iterator[None]:
    recorder.begin_wait()
    yield
    recorder.end_wait()


def _replace(group: FSDPParamGroup, name: str, method: Callable[..., None]) -> None:
    assert hasattr(group, name), f"FSDP2 of torch {torch.__version__} has no {name}"
    setattr(group, name, method)
