"""Expert parallelism over DeepEP, a library with kernels for NVLink and RDMA that users install themselves.

Written for the `deep_ep.Buffer` of its first version, which the second one keeps.

Shapes: T tokens of this rank, R rows that it receives, K experts per token, E experts, D model width.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from xorl.core.nn.dispatch import Received
from xorl.kernels.experts.plan import is_padding
from xorl.kernels.layout import RankGroup

if TYPE_CHECKING:
    from xorl.core.mesh import Axis

MODULE = "deep_ep"
# DeepEP takes the ranks of a larger group for several hosts, whose buffers have offsets of 32 bits.
HOST_RANKS = 8
MAX_RDMA_BYTES = 2**31 - 1


def deepep_refusal(device_type: str, dtype: torch.dtype) -> str | None:
    """The reason why DeepEP cannot exchange tokens in `dtype` here, or None if it can."""
    if find_spec(MODULE) is None:
        return "the package deep_ep is not installed: build it for this machine from github.com/deepseek-ai/DeepEP"
    if device_type != "cuda":
        return f"it runs on CUDA devices, not on {device_type}"
    if dtype != torch.bfloat16:
        return f"it exchanges bfloat16, not {str(dtype).removeprefix('torch.')}"
    return None


class DeepEP:
    """A `Dispatcher` over DeepEP. Its buffer is shared by all layers.

    Args:
        axis: the ranks that share the experts.
        width: D.
        buffer_bytes: the size of the buffer for NVLink on each GPU; as much again for RDMA if there are several hosts.
        num_sms: the streaming multiprocessors of its kernels; even.
        async_combine: let the layer compute what does not need the experts' output while it is being returned.

    Raises ValueError, naming the argument, if the buffer is too small or too large.
    """

    def __init__(self, axis: Axis, *, width: int, buffer_bytes: int, num_sms: int, async_combine: bool) -> None:
        self.group: RankGroup = axis.ranks
        self.returns_late = async_combine
        self._buffer = _buffer(axis.group, width * torch.bfloat16.itemsize, buffer_bytes, num_sms)

    def plan(self, ids: Tensor, num_experts: int, num_real: Tensor | None, most_tokens: int | None = None) -> _Plan:
        """As `Dispatcher.plan`; this exchange does not need `most_tokens`."""
        if num_real is not None:
            ids = ids.masked_fill(is_padding(len(ids), num_real)[:, None], -1)
        per_rank, per_host, per_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(ids, num_experts)
        return _Plan(
            ids,
            num_experts // self.group.size,
            {
                "num_tokens_per_rank": per_rank,
                "num_tokens_per_rdma_rank": per_host,
                "num_tokens_per_expert": per_expert,
                "is_token_in_rank": is_in_rank,
            },
        )

    def dispatch(self, x: Tensor, weights: Tensor, plan: _Plan) -> Received:
        """As `Dispatcher.dispatch`."""
        received, found, ids = _Dispatch.apply(x, weights, plan, self._buffer)
        return Received(received, found, torch.where(ids < 0, plan.num_local, ids), plan.num_rows)

    def combine(self, out: Tensor, plan: _Plan) -> Tensor:
        """As `Dispatcher.combine`."""
        return _Combine.apply(out, plan, self._buffer, self.returns_late)

    def wait(self, plan: _Plan) -> None:
        """As `Dispatcher.wait`."""
        if plan.returned is not None:
            plan.returned.current_stream_wait()
            plan.returned = None


class _Plan:
    """The exchange of one layer. `handle` says how it was sent: the other three exchanges of the layer repeat it."""

    def __init__(self, ids: Tensor, num_local: int, layout: dict[str, Tensor | None]) -> None:
        self.ids, self.num_local, self.layout = ids, num_local, layout
        self.handle: Any = None
        self.num_rows = 0
        self.returned: Any = None


class _Context(FunctionCtx):
    buffer: Any
    handle: Any


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        x: Tensor,
        weights: Tensor,
        plan: _Plan,
        buffer: Any,  # noqa: ANN401 - of a library without types
    ) -> tuple[Tensor, Tensor, Tensor]:
        received, ids, found, counts, plan.handle, _ = buffer.dispatch(
            x.contiguous(), topk_idx=plan.ids, topk_weights=weights.contiguous(), **plan.layout
        )
        plan.num_rows = sum(counts)
        ctx.buffer, ctx.handle = buffer, plan.handle
        ctx.mark_non_differentiable(ids)
        return received, found, ids

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weights, _ = grads
        summed, weights, _ = ctx.buffer.combine(grad_x.contiguous(), ctx.handle, topk_weights=grad_weights.contiguous())
        return summed, weights, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        out: Tensor,
        plan: _Plan,
        buffer: Any,  # noqa: ANN401 - of a library without types
        is_async: bool,
    ) -> Tensor:
        ctx.buffer, ctx.handle = buffer, plan.handle
        summed, _, event = buffer.combine(out.contiguous(), plan.handle, async_finish=is_async)
        plan.returned = event if is_async else None
        return summed

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        [grad] = grads
        return ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)[0], None, None, None


@cache
def _buffer(group: dist.ProcessGroup, row_bytes: int, buffer_bytes: int, num_sms: int) -> Any:  # noqa: ANN401
    from deep_ep import Buffer  # noqa: PLC0415  # pyright: ignore[reportMissingImports] - optional

    Buffer.set_num_sms(num_sms)
    size, is_one_host = group.size(), group.size() <= HOST_RANKS
    needed = 0
    for config in (Buffer.get_dispatch_config(size), Buffer.get_combine_config(size)):
        needed = max(needed, config.get_nvl_buffer_size_hint(row_bytes, size))
        if not is_one_host:
            needed = max(needed, config.get_rdma_buffer_size_hint(row_bytes, size))
    if buffer_bytes < needed:
        raise ValueError(
            f"buffer_bytes: DeepEP needs {needed / 1e9:.2f} GB for {size} ranks and this model, not "
            f"{buffer_bytes / 1e9:.2f}; make it larger"
        )
    if not is_one_host and buffer_bytes > MAX_RDMA_BYTES:
        raise ValueError(
            f"buffer_bytes: over several hosts, DeepEP's buffer cannot be larger than {MAX_RDMA_BYTES / 1e9:.2f} GB, "
            f"but {buffer_bytes / 1e9:.2f} were asked for; make it smaller"
        )
    return Buffer(group, num_nvl_bytes=buffer_bytes, num_rdma_bytes=0 if is_one_host else buffer_bytes)
