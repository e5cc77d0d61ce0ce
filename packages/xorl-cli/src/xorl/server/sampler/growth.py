"""Passes in which each of several samples grows by one token: most of generation.

Such a pass is a thousand small kernels, which the host takes several times as long to launch as the GPU to run. While
the model's memory stays in place, a pass is recorded once (as a CUDA graph) for each number of samples that is a power
of two, and replayed for all that follow, with rows that nobody reads where fewer samples grow.

Shapes: N samples, M samples at most, W blocks at most, V vocabulary.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from xorl.core.models import Decoder
from xorl.core.parallel import ParallelModel
from xorl.kernels.attention import GrowthLayout, KeyValueCache
from xorl.kernels.fused.device import power_of_2
from xorl.kernels.linear_ce import wide_logits

logger = logging.getLogger(__name__)

# Recorded passes at once: up to nine sizes, for each of the adapters that are sampled from in turn.
MAX_RECORDED = 128


class Growth:
    """Growth on one device, over one cache.

    Args:
        model: whose module is a Decoder.
        cache: whose last block is no sample's: the rows that fill up a recorded pass are written there.
        max_samples: M, rounded up to a power of two.
        max_tokens: of one sample.
        device: where the model computes; see `growth_refusal`.
        keep_gathered: see `ParallelModel.generation`.
    """

    def __init__(
        self,
        model: ParallelModel,
        cache: KeyValueCache,
        *,
        max_samples: int,
        max_tokens: int,
        device: torch.device,
        keep_gathered: bool,
    ) -> None:
        decoder = model.module
        assert isinstance(decoder, Decoder)
        self._model = model
        self._decoder = decoder
        self._keep_gathered = keep_gathered
        self._cache = cache
        # What fp8 keeps of the weights for training comes and goes.
        self._can_record = model.fp8_weights is None
        room = power_of_2(max_samples)
        max_blocks = -(-max_tokens // cache.block_size)
        # Pinned, so that what a pass is told is on its way while the host goes on.
        self._numbers = torch.zeros(2, room, dtype=torch.int64).pin_memory()  # tokens and positions
        self._tables = torch.zeros(max_blocks, room, dtype=torch.int64).pin_memory()
        self._device_numbers = self._numbers.to(device)
        self._device_tables = self._tables.to(device)
        # Recorded passes share the memory in which they compute, but for what they leave here.
        self._logits = torch.empty(room if self._can_record else 0, decoder.config.vocab_size, device=device)
        self._memory = torch.cuda.graph_pool_handle()
        self._recorded: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()
        self._weights: list[Tensor] = []
        self._addresses: list[int] = []

    def num_rows(self, num_samples: int) -> int:
        """Rows of the next pass, in which so many samples grow."""
        return power_of_2(num_samples) if self._records() else num_samples

    def logits(
        self, tokens: Sequence[int], tables: Sequence[Sequence[int]], totals: Sequence[int], choice: Hashable
    ) -> Tensor:
        """Logits [N, V] fp32 behind the newest tokens, until the next call.

        Args:
            tokens: the newest one of each sample.
            tables: the blocks of each sample, with room for its newest token.
            totals: tokens of each sample.
            choice: what distinguishes this pass from others of as many rows: which adapters it runs through.
        """
        num_samples = len(tokens)
        num_rows = self.num_rows(num_samples)
        self._tell(tokens, tables, totals, num_rows)
        if not self._records():
            return self._pass(num_rows)
        if not self._recorded or [weight.data_ptr() for weight in self._weights] != self._addresses:
            self._begin_anew()
        key = (num_rows, choice)
        if key in self._recorded:
            self._recorded.move_to_end(key)
        elif (reason := self._waits(num_rows)) is None:
            self._record(key, num_rows)
        else:
            logger.warning("event=generation_not_recorded rows=%d why=%s", num_rows, reason)
            self._can_record = False
            self._recorded.clear()
            return self._pass(num_rows)[:num_samples]
        self._recorded[key].replay()
        return self._logits[:num_samples]

    def _records(self) -> bool:
        """Whether the next pass is one that is, or is to be, recorded."""
        return self._can_record and self._model.is_gathered

    def _begin_anew(self) -> None:
        """Nothing is recorded, or some weight is elsewhere than it was then."""
        self._recorded.clear()
        # Torch does not let a pool that nothing uses any more be used again.
        self._memory = torch.cuda.graph_pool_handle()
        self._weights = [*self._decoder.parameters(), *self._decoder.buffers()]
        self._addresses = [weight.data_ptr() for weight in self._weights]

    def _tell(
        self, tokens: Sequence[int], tables: Sequence[Sequence[int]], totals: Sequence[int], num_rows: int
    ) -> None:
        """Put what the pass is about onto the device; rows behind the samples write to the cache's last block."""
        count = len(tokens)
        numbers, host_tables = self._numbers.numpy(), self._tables.numpy()
        numbers[:, count:num_rows] = 0
        numbers[0, :count] = tokens
        numbers[1, :count] = totals
        numbers[1, :count] -= 1
        for column, table in enumerate(tables):
            host_tables[: len(table), column] = table
        host_tables[0, count:num_rows] = self._cache.num_blocks - 1
        longest = max(len(table) for table in tables)
        self._device_numbers.copy_(self._numbers, non_blocking=True)
        self._device_tables[:longest].copy_(self._tables[:longest], non_blocking=True)

    def _pass(self, num_rows: int) -> Tensor:
        tokens, positions = self._device_numbers[:, :num_rows].unbind()
        layout = GrowthLayout(self._cache, self._device_tables[:, :num_rows], positions)
        with self._model.generation(keep_gathered=self._keep_gathered):
            return self._model.forward(tokens, layout, loss=wide_logits)

    def _waits(self, num_rows: int) -> str | None:
        """Why a pass cannot be recorded: the host waits for the device in it. None where it does not.

        Asked before each recording, since one that fails midway leaves torch's allocator and generators recording.
        """
        # The first pass compiles kernels, and makes what is then kept, such as the rotary embedding's frequencies.
        self._pass(num_rows)
        torch.cuda.set_sync_debug_mode("error")
        try:
            self._pass(num_rows)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as problem:
            return str(problem).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return None

    def _record(self, key: Hashable, num_rows: int) -> None:
        graph = torch.cuda.CUDAGraph()
        with (
            # So that this is the current stream again, whatever happens.
            torch.cuda.stream(torch.cuda.current_stream()),
            self._model.recordable(),
            torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"),
        ):
            self._logits[:num_rows].copy_(self._pass(num_rows))
        self._recorded[key] = graph
        if len(self._recorded) > MAX_RECORDED:
            self._recorded.popitem(last=False)
