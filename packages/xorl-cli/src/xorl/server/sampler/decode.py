"""Decode passes, which add one token to each running sample. Most of generation consists of them.

A decode pass launches about a thousand small kernels, and the host takes several times as long to launch them as the
GPU takes to run them. As long as the weights stay at the same addresses, a pass is recorded once as a CUDA graph for
each power of two of samples and then replayed. With fewer samples, the remaining rows are padding.

Shapes: N samples, M maximum samples, W maximum blocks, V vocabulary.
"""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from xorl.core.graphs import new_graph
from xorl.core.models import Decoder
from xorl.core.parallel import ParallelModel
from xorl.kernels.attention import DecodeLayout, KeyValueCache
from xorl.kernels.fused.device import power_of_2
from xorl.kernels.linear_ce import wide_logits

logger = logging.getLogger(__name__)

# The maximum number of recorded passes: up to nine sizes for each combination of adapters.
MAX_RECORDED = 128


class DecodePass:
    """Computes decode passes on one device, over one cache.

    Args:
        model: its module is a Decoder.
        cache: its last block and its last slot must not belong to a sample: padding rows of recorded passes write to
            them.
        max_samples: M, rounded up to a power of two.
        max_tokens: the maximum length of one sample.
        device: the model's device; see `decode_refusal`.
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
        # fp8 training frees its converted weights and allocates new ones at other addresses. Where experts are divided,
        # the host waits in every pass, and all ranks take part in it.
        self._can_record = model.fp8_weights is None and not model.divides_experts
        room = power_of_2(max_samples)
        max_blocks = -(-max_tokens // cache.block_size)
        # Pinned, so that the copy to the device overlaps with the host's work.
        self._numbers = torch.zeros(3, room, dtype=torch.int64).pin_memory()  # tokens, positions and slots
        self._tables = torch.zeros(max_blocks, room, dtype=torch.int64).pin_memory()
        self._device_numbers = self._numbers.to(device)
        self._device_tables = self._tables.to(device)
        # Recorded passes share their working memory, except for their outputs.
        self._logits = torch.empty(room if self._can_record else 0, decoder.config.vocab_size, device=device)
        self._routes: dict[int, Tensor] = {}  # by number of rows
        self._memory = torch.cuda.graph_pool_handle()
        self._recorded: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()
        self._weights: list[Tensor] = []
        self._addresses: list[int] = []

    def num_rows(self, num_samples: int) -> int:
        """The number of rows of the next pass for this number of samples."""
        return power_of_2(num_samples) if self._is_recorded() else num_samples

    def logits(
        self,
        tokens: Sequence[int],
        tables: Sequence[Sequence[int]],
        totals: Sequence[int],
        slots: Sequence[int],
        choice: Hashable,
        *,
        records: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [N, V] fp32 for the tokens after the newest ones, and routes of these; valid until the next call.

        Args:
            tokens: the newest token of each sample.
            tables: the blocks of each sample, with room for its newest token.
            totals: the number of tokens of each sample.
            slots: where the states of each sample are.
            choice: identifies the adapters of the pass; recorded passes are replayed only for the same choice.
            records: whether to return the routes, [N, layers with experts, experts per token].
        """
        num_samples = len(tokens)
        num_rows = self.num_rows(num_samples)
        self._copy_inputs(tokens, tables, totals, slots, num_rows)
        if not self._is_recorded():
            return self._pass(num_rows, records=records)
        if not self._recorded or [weight.data_ptr() for weight in self._weights] != self._addresses:
            self._discard_recordings()
        key = (num_rows, choice, records)
        if key in self._recorded:
            self._recorded.move_to_end(key)
        elif (reason := self._recording_refusal(num_rows, records=records)) is None:
            self._record(key, num_rows, records=records)
        else:
            logger.warning("event=generation_not_recorded rows=%d why=%s", num_rows, reason)
            self._can_record = False
            self._recorded.clear()
            logits, routes = self._pass(num_rows, records=records)
            return logits[:num_samples], routes
        self._recorded[key].replay()
        return self._logits[:num_samples], self._routes[num_rows] if records else None

    def _is_recorded(self) -> bool:
        """Whether the next pass is replayed, or recorded first if it has not been."""
        return self._can_record and self._model.is_gathered

    def _discard_recordings(self) -> None:
        """Discard all recorded passes and store the current addresses of the weights."""
        self._recorded.clear()
        # Torch does not allow a pool to be reused once all its graphs are freed.
        self._memory = torch.cuda.graph_pool_handle()
        self._weights = [*self._decoder.parameters(), *self._decoder.buffers()]
        self._addresses = [weight.data_ptr() for weight in self._weights]

    def _copy_inputs(
        self,
        tokens: Sequence[int],
        tables: Sequence[Sequence[int]],
        totals: Sequence[int],
        slots: Sequence[int],
        num_rows: int,
    ) -> None:
        """Copy the inputs of the pass to the device; padding rows write to the cache's last block and slot."""
        count = len(tokens)
        numbers, host_tables = self._numbers.numpy(), self._tables.numpy()
        numbers[:, count:num_rows] = 0
        numbers[0, :count] = tokens
        numbers[1, :count] = totals
        numbers[1, :count] -= 1
        numbers[2, :count] = slots
        numbers[2, count:num_rows] = self._cache.num_slots - 1
        for column, table in enumerate(tables):
            host_tables[: len(table), column] = table
        host_tables[0, count:num_rows] = self._cache.num_blocks - 1
        longest = max(len(table) for table in tables)
        self._device_numbers.copy_(self._numbers, non_blocking=True)
        self._device_tables[:longest].copy_(self._tables[:longest], non_blocking=True)

    def _pass(self, num_rows: int, *, records: bool) -> tuple[Tensor, Tensor | None]:
        tokens, positions, slots = self._device_numbers[:, :num_rows].unbind()
        layout = DecodeLayout(self._cache, self._device_tables[:, :num_rows], positions, slots)
        routers = self._decoder.routers if records else None
        with (
            self._model.generation(keep_gathered=self._keep_gathered),
            nullcontext() if routers is None else routers.recording(),
        ):
            logits = self._model.forward(tokens, layout, loss=wide_logits)
            return logits, None if routers is None else routers.take_routes()

    def _recording_refusal(self, num_rows: int, *, records: bool) -> str | None:
        """The reason why a pass cannot be recorded (the host waits for the device in it), or None if it can.

        Checked before each recording, since a recording that fails midway leaves torch's allocator and random number
        generators in recording mode.
        """
        # The first pass compiles kernels and creates cached values such as the rotary embedding's frequencies.
        _, routes = self._pass(num_rows, records=records)
        if routes is not None and num_rows not in self._routes:
            self._routes[num_rows] = torch.empty_like(routes)
        with warnings.catch_warnings():
            # Torch's warning about this mode, which users of the service cannot act on.
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
            torch.cuda.set_sync_debug_mode("error")
        try:
            self._pass(num_rows, records=records)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as problem:
            return str(problem).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return None

    def _record(self, key: Hashable, num_rows: int, *, records: bool) -> None:
        graph = new_graph()
        with (
            # Restores the current stream even if recording fails.
            torch.cuda.stream(torch.cuda.current_stream()),
            self._model.cuda_graph_capture(),
            torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"),
        ):
            logits, routes = self._pass(num_rows, records=records)
            self._logits[:num_rows].copy_(logits)
            if routes is not None:
                self._routes[num_rows].copy_(routes)
        self._recorded[key] = graph
        if len(self._recorded) > MAX_RECORDED:
            self._recorded.popitem(last=False)
