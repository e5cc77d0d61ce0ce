"""Sampler: continuous batching. Requests enter and leave between steps; each step advances all running ones.

Shapes: T tokens of a pass, D model width, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, count
from types import MappingProxyType

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from xorl.core.models import Decoder, DecoderConfig
from xorl.core.parallel import ParallelModel
from xorl.kernels.attention import AttentionRequest, KeyValueCache, MixedLayout, growth_refusal
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.linear_ce import wide_logits
from xorl.lora import AdapterBank
from xorl.server.collectives import all_or_none
from xorl.server.sampler.blocks import BlockPool
from xorl.server.sampler.decode import DecodePass
from xorl.server.sampler.draw import Drawn, DrawRule, draw, uniform_number
from xorl.server.sampler.request import Sample, SampleRequest, SampleResult, TopLogprobs
from xorl.server.sampler.schedule import Continuation, Piece, Schedule
from xorl.server.sampler.score import PromptScores

# Tokens of a block: few enough that little of the last block is unused, many enough that tables are short.
BLOCK_SIZE = 16


def cache_bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
    """The bytes of the keys and values of one token, over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


class Sampler:
    """Generation with a placed decoder, on the same ranks and with the same weights as its training.

    On several ranks, every one must make the same calls in the same order, and gets the same results. Steps may run
    between forward passes with gradients, which they do not affect, but not between a forward pass and its backward
    pass. Compiled layers run uncompiled, so nothing is compiled for lengths that grow by one, and the code compiled for
    training is kept.

    Args:
        model: its module is a Decoder.
        device: of the model.
        cache_tokens: the number of tokens whose keys and values the cache holds (`cache_bytes_per_token`), over all
            requests, rounded down to whole blocks.
        max_running: the most samples that grow at the same time.
        max_step_tokens: the most tokens that one step computes: longer prompts take several.
        keep_gathered: leave sharded parameters gathered from step to step, so that only the first step gathers them.
            They take the memory of the whole model until `forget` or training frees it.
        is_dealt: deal requests to the ranks in turn, so that one rank computes each of them; without it, all ranks
            compute all requests.
        bank: the adapters of requests; None if they have none. An adapter may be removed, and another one get its name,
            once its requests are finished or cancelled and `weights_changed` was called for it.
    """

    def __init__(
        self,
        model: ParallelModel,
        *,
        device: torch.device,
        cache_tokens: int,
        max_running: int = 256,
        max_step_tokens: int = 8192,
        keep_gathered: bool = False,
        is_dealt: bool = False,
        bank: AdapterBank | None = None,
    ) -> None:
        for name, value in (("max_running", max_running), ("max_step_tokens", max_step_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if cache_tokens < BLOCK_SIZE:
            raise ValueError(f"cache_tokens must be at least {BLOCK_SIZE}, which is one block, got {cache_tokens}")
        decoder = model.module
        assert isinstance(decoder, Decoder)
        self._model = model
        self._decoder = decoder
        self._device = device
        self._keep_gathered = keep_gathered
        self._is_dealt = is_dealt
        self._rank, self._num_ranks = (dist.get_rank(), dist.get_world_size()) if is_dealt else (0, 1)
        self._bank = bank
        self._pool = BlockPool(cache_tokens // BLOCK_SIZE, BLOCK_SIZE)
        self._limit, self._limited_by = _limit(decoder.config, self._pool.num_blocks * BLOCK_SIZE)
        self._cache: KeyValueCache | None = None
        self._decode: DecodePass | None = None
        self._max_running = max_running
        self._schedule = Schedule(
            self._pool,
            max_running=max_running,
            max_tokens=max_step_tokens,
            max_adapters=0 if bank is None else bank.num_resident,
            root=self._root,
        )
        self._versions: dict[str | None, int] = {}
        self._num_changes: Counter[str | None] = Counter()
        self._request_ids = count()
        self._pending: dict[int, list[Continuation]] = {}
        self._scores: dict[int, PromptScores] = {}

    @property
    def limit(self) -> int:
        """The most tokens of a prompt and a sample together; the last sampled one needs no room and is not counted."""
        return self._limit

    @property
    def num_pending(self) -> int:
        """The number of requests without a result."""
        return len(self._pending)

    def submit(self, request: SampleRequest) -> int:
        """Queue a request; returns its id. Raises ValueError if this model cannot continue it."""
        self._check(request)
        request_id = next(self._request_ids)
        if request_id % self._num_ranks != self._rank:
            self._pending[request_id] = []
            return request_id
        num_samples = request.num_samples if request.max_tokens else 1
        continuations = [
            Continuation(request_id, index, request, list(request.prompt), request.asks_about_prompt and index == 0)
            for index in range(num_samples)
        ]
        if request.asks_about_prompt:
            self._scores[request_id] = PromptScores(request)
        self._pending[request_id] = continuations
        self._schedule.waiting.extend(continuations)
        return request_id

    def step(self, cancelled: Sequence[int] = ()) -> list[SampleResult]:
        """Run one planned pass; returns the results of the requests that it finished, none without requests.

        cancelled: requests that end with this pass, without a result if it does not finish them. Where requests are
        dealt to ranks, each rank may name others.
        If it fails on one of the ranks that requests are dealt to, it fails on all of them. They must then cancel all
        requests, since some ranks may have finished theirs.
        """
        if not self._pending:
            return []
        try:
            finished, gone = self._exchange(cancelled) if self._is_dealt else (self._finished(), cancelled)
        except BaseException:
            # Blocks already have keys for tokens that were not computed.
            self.forget()
            raise
        for result in finished:
            self._pending.pop(result.request_id)
        for request_id in gone:
            self.cancel(request_id)
        return finished

    def run(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """The results of `requests`, in order, when all are finished. Nothing else may be pending."""
        assert not self._pending, "results of other requests would be lost"
        request_ids = [self.submit(request) for request in requests]
        found: dict[int, SampleResult] = {}
        while self._pending:
            found |= {result.request_id: result for result in self.step()}
        return [found[request_id] for request_id in request_ids]

    def cancel(self, request_id: int) -> None:
        """Cancel a request; does nothing if it is finished."""
        for continuation in self._pending.pop(request_id, []):
            self._schedule.remove(continuation)
        self._scores.pop(request_id, None)

    def cancel_all(self) -> None:
        """Forget every request; on several ranks, also after they have not all made the same calls."""
        for request_id in list(self._pending):
            self.cancel(request_id)
        self._request_ids = count()

    def weights_changed(self, version: int, adapter: str | None = None) -> None:
        """Declare that an adapter's weights (None: the model's) have changed, and name their new version.

        Cache entries of the old weights are not used again. Samples that have begun continue with the new weights from
        their current tokens.
        """
        self._versions[adapter] = version
        self._num_changes[adapter] += 1
        affected = [c for c in self._schedule.running if adapter in (None, c.request.adapter)]
        for continuation in reversed(affected):
            self._schedule.retract(continuation)
        if adapter is None:
            self._pool.forget_all()

    def forget(self) -> None:
        """Free the memory of the cache and of gathered parameters.

        The next step recomputes the tokens of running samples.
        """
        self._schedule.retract_all()
        self._pool.forget_all()
        self._cache = self._decode = None
        self._model.drop_gathered()

    def _check(self, request: SampleRequest) -> None:
        config = self._decoder.config
        total = len(request.prompt) + max(request.max_tokens - 1, 0)
        if total > self._limit:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens and max_tokens: {request.max_tokens} are {total} tokens to "
                f"compute, more than the {self._limit} that {self._limited_by}: lower max_tokens or shorten the prompt"
            )
        targets = () if request.target_tokens is None else request.target_tokens.ravel().tolist()
        for name, tokens, lowest in (("prompt", request.prompt, 0), ("target_tokens", targets, -1)):
            if outside := [token for token in tokens if not lowest <= token < config.vocab_size]:
                raise ValueError(f"{name}: {outside[0]} is no token of a vocabulary of {config.vocab_size}")
        most = max(request.top_prompt_logprobs, request.top_sample_logprobs)
        if most > config.vocab_size:
            raise ValueError(f"{most} most likely tokens were asked for, of a vocabulary of {config.vocab_size}")
        if request.adapter is not None and (self._bank is None or request.adapter not in self._bank.names):
            known = ", ".join(map(repr, self._bank.names if self._bank is not None else ()))
            raise ValueError(f"adapter: there is no {request.adapter!r}; there are {known or 'none'}")

    def _finished(self) -> list[SampleResult]:
        """A step of this rank: the results of the requests that it finished here."""
        pieces = self._schedule.plan()
        # The tokens of an adapter must be adjacent.
        pieces.sort(key=_adapter_order)
        return self._advance(pieces, self._compute(pieces))

    def _exchange(self, cancelled: Sequence[int]) -> tuple[list[SampleResult], list[int]]:
        """A step of every rank: the results that all have, in the order of their ids, and what any rank cancels."""
        with all_or_none("a step of the sampler") as num_told:
            finished = self._finished()
            num_told.number += len(finished) + len(cancelled)
        if not num_told.number:
            return [], []
        told: list[tuple[list[SampleResult], Sequence[int]]] = [([], ()) for _ in range(self._num_ranks)]
        dist.all_gather_object(told, (finished, cancelled))
        results = chain.from_iterable(finished for finished, _ in told)
        gone = chain.from_iterable(cancelled for _, cancelled in told)
        return sorted(results, key=lambda result: result.request_id), list(gone)

    def _root(self, adapter: str | None) -> bytes:
        return repr((adapter, self._num_changes[None], self._num_changes[adapter])).encode()

    @torch.no_grad()
    def _compute(self, pieces: Sequence[Piece]) -> dict[Piece, tuple[Drawn, int]]:
        """Compute the pieces; returns the drawn token for each piece that ends with the newest token and needs another.

        If there are other pieces, those that only grow are computed first and separately: they do not depend on the
        others, and samples that begin may share blocks that they write. If parameters are gathered during a pass, in
        which all ranks take part, each rank makes one pass for all pieces.
        """
        if self._cache is None:
            self._cache = self._make_cache()
            request = AttentionRequest(self._device.type, self._cache.keys.dtype, self._decoder.config.head_dim, None)
            if growth_refusal(request) is None:
                self._decode = self._make_growth(self._cache)
        gathers_nothing = self._model.is_gathered and (self._keep_gathered or not self._model.is_sharded)
        growing = [piece for piece in pieces if piece.grows]
        others = [piece for piece in pieces if not piece.grows]
        if self._decode is None or (others and not gathers_nothing):
            growing, others = [], list(pieces)
        drawn: dict[Piece, tuple[Drawn, int]] = {}
        if growing and self._decode is not None:
            drawn |= self._grow(growing, self._decode)
        if others:
            drawn |= self._forward(others, self._cache)
        if not pieces and not gathers_nothing:
            self._forward_nothing()
        return drawn

    def _grow(self, pieces: Sequence[Piece], decode: DecodePass) -> Mapping[Piece, tuple[Drawn, int]]:
        choice = None
        if self._bank is not None:
            runs = _runs(pieces)
            adapter, length = runs.pop()
            choice = self._bank.activate([*runs, (adapter, length + decode.num_rows(len(pieces)) - len(pieces))])
        logits = decode.logits(
            [piece.continuation.tokens[piece.start] for piece in pieces],
            [piece.continuation.blocks for piece in pieces],
            [piece.stop for piece in pieces],
            choice,
        )
        return self._draw(logits, pieces)

    def _forward(self, pieces: Sequence[Piece], cache: KeyValueCache) -> Mapping[Piece, tuple[Drawn, int]]:
        layout = MixedLayout(
            cache,
            tables=[piece.continuation.blocks for piece in pieces],
            new=[piece.stop - piece.start for piece in pieces],
            totals=[piece.stop for piece in pieces],
            device=self._device,
        )
        tokens = [token for piece in pieces for token in piece.continuation.tokens[piece.start : piece.stop]]
        if self._bank is not None:
            self._bank.activate(_runs(pieces))
        with self._model.generation(keep_gathered=self._keep_gathered):
            return self._model.forward(
                torch.tensor(tokens, device=self._device),
                layout,
                loss=lambda hidden, weight: self._read(hidden, weight, pieces, layout.offsets.tolist()),
            )

    def _forward_nothing(self) -> None:
        """Take part in the collectives of a pass in which this rank has no work, with a token that nobody reads."""
        with self._model.generation(keep_gathered=self._keep_gathered):
            if self._bank is not None:
                self._bank.activate([(None, 1)])
            layout = SequenceLayout.from_lengths([1], self._device)
            self._model.forward(torch.zeros(1, dtype=torch.int64, device=self._device), layout)

    def _read(
        self, hidden: Tensor, weight: Tensor, pieces: Sequence[Piece], offsets: Sequence[int]
    ) -> Mapping[Piece, tuple[Drawn, int]]:
        """Score prompts and draw tokens while the head's weight is gathered. hidden is [T, D], weight [V, D]."""
        ends: dict[Piece, int] = {}
        for piece, start, stop in zip(pieces, offsets, offsets[1:], strict=False):
            if piece.continuation.scores_prompt:
                self._scores[piece.continuation.request_id].add(hidden[start:stop], weight, piece.start)
            if piece.is_last and piece.continuation.request.max_tokens:
                ends[piece] = stop - 1
        if not ends:
            return MappingProxyType({})
        rows = hidden[torch.tensor(list(ends.values()), device=hidden.device)]
        return self._draw(wide_logits(rows, weight), list(ends))

    def _draw(self, logits: Tensor, pieces: Sequence[Piece]) -> Mapping[Piece, tuple[Drawn, int]]:
        """A token for each piece, from its row of logits [R, V]."""
        rules = [_rule(piece.continuation) for piece in pieces]
        num_top = max(piece.continuation.request.top_sample_logprobs for piece in pieces)
        drawn = draw(logits, rules, num_top)
        return {piece: (drawn, row) for row, piece in enumerate(pieces)}

    def _advance(self, pieces: Sequence[Piece], drawn: Mapping[Piece, tuple[Drawn, int]]) -> list[SampleResult]:
        """Append drawn tokens, release finished samples, and collect the finished requests."""
        finished: list[SampleResult] = []
        for piece in pieces:
            continuation = piece.continuation
            continuation.num_cached = piece.stop
            if not piece.is_last:
                continue
            continuation.scores_prompt = False
            if piece in drawn:
                self._append(continuation, *drawn[piece])
            else:
                continuation.finish_reason = "length"
            if continuation.finish_reason is not None:
                self._schedule.remove(continuation)
                together = self._pending[continuation.request_id]
                if all(one.finish_reason is not None for one in together):
                    finished.append(self._finish(continuation.request_id))
        return finished

    def _append(self, continuation: Continuation, drawn: Drawn, row: int) -> None:
        request = continuation.request
        continuation.tokens.append(int(drawn.tokens[row]))
        continuation.logprobs.append(float(drawn.logprobs[row]))
        version = self._versions.get(request.adapter, 0)
        continuation.versions = [*continuation.versions[:1], version]
        if num_top := request.top_sample_logprobs:
            top = drawn.top_tokens[row, :num_top].int().numpy(), drawn.top_logprobs[row, :num_top].numpy()
            continuation.tops.append(top)
        if any(_ends_with(continuation, sequence) for sequence in request.stop) or (
            request.is_end is not None and request.is_end(continuation.tokens[len(request.prompt) :])
        ):
            continuation.finish_reason = "stop"
        elif continuation.num_sampled == request.max_tokens:
            continuation.finish_reason = "length"

    def _finish(self, request_id: int) -> SampleResult:
        continuations = self._pending[request_id]
        scores = self._scores.pop(request_id, None)
        return SampleResult(
            request_id,
            samples=tuple(_sample(one) for one in continuations if one.request.max_tokens),
            prompt_logprobs=None if scores is None else scores.prompt_logprobs,
            top_prompt_logprobs=None if scores is None else scores.top_prompt_logprobs,
            target_logprobs=None if scores is None else scores.target_logprobs,
            num_cached_tokens=continuations[0].num_found or 0,
        )

    def _make_cache(self) -> KeyValueCache:
        config = self._decoder.config
        return KeyValueCache(
            num_layers=config.num_layers,
            # One more, for the padding rows of recorded passes.
            num_blocks=self._pool.num_blocks + 1,
            block_size=BLOCK_SIZE,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self._decoder.compute_dtype,
            device=self._device,
        )

    def _make_growth(self, cache: KeyValueCache) -> DecodePass:
        return DecodePass(
            self._model,
            cache,
            max_samples=self._max_running,
            max_tokens=self._limit,
            device=self._device,
            keep_gathered=self._keep_gathered,
        )


def _limit(config: DecoderConfig, cache_tokens: int) -> tuple[int, str]:
    """The most tokens of one sample that can be computed, and the name of the limit."""
    limit, because = cache_tokens, "the cache holds (sampler_cache_tokens)"
    if config.max_position_embeddings < limit:
        limit, because = config.max_position_embeddings, "the model has positions for"
    if config.rope is not None and config.rope.kind == "dynamic" and config.rope.trained_length < limit:
        limit, because = config.rope.trained_length, "its dynamic rotary embedding leaves keys as they are for"
    return limit, because


def _adapter_order(piece: Piece) -> tuple[bool, str]:
    adapter = piece.continuation.request.adapter
    return adapter is not None, adapter or ""


def _runs(pieces: Sequence[Piece]) -> list[tuple[str | None, int]]:
    """The consecutive runs of one adapter in the row, as (adapter, number of tokens)."""
    lengths: dict[str | None, int] = {}
    for piece in pieces:
        adapter = piece.continuation.request.adapter
        lengths[adapter] = lengths.get(adapter, 0) + piece.stop - piece.start
    return list(lengths.items())


def _rule(continuation: Continuation) -> DrawRule:
    request = continuation.request
    number = uniform_number(request.seed + continuation.index, continuation.num_sampled)
    return DrawRule(request.temperature, request.top_k, request.top_p, number)


def _ends_with(continuation: Continuation, sequence: Sequence[int]) -> bool:
    """Whether the sampled tokens end with these; the prompt's do not count."""
    length = len(sequence)
    return length <= continuation.num_sampled and continuation.tokens[-length:] == list(sequence)


def _sample(continuation: Continuation) -> Sample:
    assert continuation.finish_reason is not None
    top = None
    if continuation.request.top_sample_logprobs:
        token_ids, logprobs = zip(*continuation.tops, strict=True)
        top = TopLogprobs(np.stack(token_ids), np.stack(logprobs))
    return Sample(
        tokens=tuple(continuation.tokens[len(continuation.request.prompt) :]),
        logprobs=np.array(continuation.logprobs, np.float32),
        finish_reason=continuation.finish_reason,
        top_logprobs=top,
        versions=(continuation.versions[0], continuation.versions[-1]),
    )
