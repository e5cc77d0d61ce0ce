"""A stand-in for the `deep_ep` package: its `Buffer` as published, over torch's collectives and for any dtype."""

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

# The least that a buffer must have in the stand-in.
SIZE_HINT = 4096


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return SIZE_HINT

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class Event:
    def __init__(self) -> None:
        self.num_waits = 0

    def current_stream_wait(self) -> None:
        self.num_waits += 1


class Buffer:
    """Sends a token once to each rank that has one of its experts, as DeepEP does; -1 stands for experts elsewhere."""

    num_sms = 20
    events: ClassVar[list[Event]] = []

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(number: int) -> None:
        assert number % 2 == 0
        Buffer.num_sms = number

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Tensor, None, Tensor, Tensor, Event]:
        assert topk_idx.dtype == torch.int64
        size = self.group.size()
        per_expert = torch.stack([(topk_idx == expert).sum() for expert in range(num_experts)]).int()
        ranks = torch.where(topk_idx < 0, -1, topk_idx // (num_experts // size))
        is_in_rank = torch.stack([(ranks == rank).any(1) for rank in range(size)], dim=1)
        return is_in_rank.sum(0).int(), None, per_expert, is_in_rank, Event()

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, list[int] | None, Any, Event]:
        assert x.is_contiguous()
        if handle is not None:
            return self._send(x, handle), None, None, None, None, Event()
        assert topk_idx is not None
        assert topk_weights is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_rank is not None
        assert num_tokens_per_expert is not None
        handle = (is_token_in_rank, self._send(is_token_in_rank.new_ones(len(x), 1), (is_token_in_rank, None), True))
        local = len(num_tokens_per_expert) // self.group.size()
        ids = self._send(topk_idx, handle) - self.group.rank() * local
        ids = torch.where((ids >= 0) & (ids < local), ids, -1)
        counts = [int((ids == expert).sum()) for expert in range(local)]
        return self._send(x, handle), ids, self._send(topk_weights, handle), counts, handle, Event()

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, async_finish: bool = False
    ) -> tuple[Tensor, Tensor | None, Event]:
        event = Event()
        if async_finish:
            Buffer.events.append(event)
        return self._return(x, handle), None if topk_weights is None else self._return(topk_weights, handle), event

    def _send(self, x: Tensor, handle: Any, counts_only: bool = False) -> Any:
        is_in_rank, sizes = handle
        parts = [x[is_in_rank[:, rank]] for rank in range(self.group.size())]
        if counts_only:
            sizes = [None] * self.group.size()
            dist.all_gather_object(sizes, [len(part) for part in parts], group=self.group)
            return [of_rank[self.group.rank()] for of_rank in sizes]
        received = x.new_empty(sum(sizes), *x.shape[1:])
        dist.all_to_all_single(received, torch.cat(parts), sizes, [len(part) for part in parts], group=self.group)
        return received

    def _return(self, x: Tensor, handle: Any) -> Tensor:
        is_in_rank, sizes = handle
        sent = is_in_rank.sum(0).tolist()
        back = x.new_empty(sum(sent), *x.shape[1:])
        dist.all_to_all_single(back, x.contiguous(), sent, sizes, group=self.group)
        total = x.new_zeros(len(is_in_rank), *x.shape[1:])
        for rank, part in enumerate(back.split(sent)):
            total[is_in_rank[:, rank]] += part
        return total
