"""Sampler: continuous batching. Requests join and leave between steps; each step advances all running samples.

Shapes: T tokens of a pass, D model width, V vocabulary, R rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import chain, count

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from xorl.core.models import Decoder, DecoderConfig
from xorl.core.parallel import ParallelModel
from xorl.kernels.attention import KeyValueCache, MixedLayout, decode_refusal
from xorl.kernels.head import HeadWeight
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.linear_ce import wide_logits
from xorl.lora import AdapterBank
from xorl.server.collectives import all_or_none
from xorl.server.context_length import POSITIONS, check_context
from xorl.server.sampler.blocks import BlockPool
from xorl.server.sampler.cache_size import make_cache, num_slots
from xorl.server.sampler.decode import DecodePass
from xorl.server.sampler.draw import Drawn, DrawRule, draw, uniform_number
from xorl.server.sampler.request import GeneratedSample, GenerationRequest, GenerationResult, LikelyTokens
from xorl.server.sampler.routes import add_routes, continuation_of, need_routes, prompt_routes, sample_routes
from xorl.server.sampler.scheduler import Continuation, SampleScheduler, TokenSpan
from xorl.server.sampler.score import PromptScores

# Tokens per block: few, so that little of each sample's last block is wasted, but enough to keep block tables short.
BLOCK_SIZE = 16


class Sampler:
    """Generation with a placed decoder, on the same ranks and with the same weights as its training.

    All ranks must make the same calls in the same order; they get the same results. Steps may run between training
    steps, which they do not affect, but not between a forward pass and its backward pass. Compiled layers run
    uncompiled here: otherwise they would be recompiled for the growing lengths, and training's code would be evicted.

    Args:
        model: its module is a Decoder.
        device: the model's device.
        cache_tokens: the number of tokens whose keys and values the cache holds (`cache_bytes_per_token`), over all
            requests, rounded down to whole blocks.
        max_running: the maximum number of samples that run at the same time; fewer, if the states of recurrences would
            take too much memory (`num_slots`).
        max_step_tokens: the maximum number of tokens computed in one step; longer prompts take several steps.
        keep_gathered: keep sharded parameters gathered between steps, so that only the first step gathers them. They
            take the memory of the whole model until `release_memory` or training frees it.
        is_distributed: assign requests to the ranks in turn, so that each request is computed by one rank. Otherwise
            all ranks compute all requests.
        bank: the adapters of requests; None if they have none. An adapter may be removed, and its name reused, once its
            requests are finished or cancelled and `weights_changed` was called for it.
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
        is_distributed: bool = False,
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
        self._is_distributed = is_distributed
        self._rank, self._num_ranks = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
        self._bank = bank
        self._pool = BlockPool(cache_tokens // BLOCK_SIZE, BLOCK_SIZE)
        self._limit, self._limited_by = _limit(decoder.config, self._pool.num_blocks * BLOCK_SIZE)
        self._cache: KeyValueCache | None = None
        self._decode: DecodePass | None = None
        self._max_running = num_slots(decoder, device, max_running)
        self._scheduler = SampleScheduler(
            self._pool,
            max_running=self._max_running,
            max_tokens=max_step_tokens,
            max_adapters=0 if bank is None else bank.num_per_pass,
            root=self._key_root,
            shares_prefixes=not decoder.config.recurrences,
        )
        self._versions: dict[str | None, int] = {}
        self._num_changes: Counter[str | None] = Counter()
        self._request_ids = count()
        self._pending: dict[int, list[Continuation]] = {}
        self._scores: dict[int, PromptScores] = {}

    @property
    def limit(self) -> int:
        """The maximum number of tokens of prompt and sample, not counting the last one, which is not computed."""
        return self._limit

    def check_length(self, num_prompt: int, max_tokens: int) -> None:
        """Raise ContextOverflow unless a prompt and a sample of this many tokens fit."""
        check_context(num_prompt, max_tokens, self._limit, self._limited_by)

    @property
    def num_pending(self) -> int:
        """The number of requests without a result."""
        return len(self._pending)

    def submit(self, request: GenerationRequest) -> int:
        """Queue a request; returns its id. Raises ValueError if the sampler cannot run it."""
        self.check(request)
        request_id = next(self._request_ids)
        if request_id % self._num_ranks != self._rank:
            self._pending[request_id] = []
            return request_id
        num_samples = request.num_samples if request.max_tokens else 1
        continuations = [continuation_of(request_id, index, request) for index in range(num_samples)]
        if request.first_scored is not None:
            self._scores[request_id] = PromptScores(request)
        self._pending[request_id] = continuations
        self._scheduler.add(continuations)
        return request_id

    def is_pending(self, request_id: int) -> bool:
        """Whether a request has no result yet and was not cancelled."""
        return request_id in self._pending

    def done(self, request_id: int) -> float:
        """The share of a request's tokens already sampled; 1 if it is not pending, or if another rank samples it."""
        continuations = self._pending.get(request_id)
        if not continuations:
            return 1.0
        left = [one.request.max_tokens - one.num_sampled for one in continuations if one.finish_reason is None]
        return 1.0 - sum(left) / (len(continuations) * max(continuations[0].request.max_tokens, 1))

    def sampled(self, request_id: int) -> list[list[int]]:
        """The tokens sampled so far, of each sample of a pending request that this rank samples."""
        return [one.tokens[len(one.request.prompt) :] for one in self._pending[request_id]]

    def step(self, cancelled: Sequence[int] = ()) -> list[GenerationResult]:
        """Run one pass; returns the results of the requests that it finished. Does nothing without requests.

        If `is_distributed` and the step fails on one rank, it fails on all. All must then call `cancel_all`, since some
        ranks may have finished their requests.

        cancelled: ids of requests to end with this pass; they have a result only if it finishes them. If
        `is_distributed`, ranks may pass different ids.
        """
        if not self._pending:
            return []
        try:
            finished, ended = (
                self._step_all_ranks(cancelled) if self._is_distributed else (self._step_this_rank(), cancelled)
            )
        except BaseException:
            # Blocks already have keys for tokens that were not computed.
            self.release_memory()
            raise
        for result in finished:
            self._pending.pop(result.request_id)
        for request_id in ended:
            self.cancel(request_id)
        return finished

    def run(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Run `requests` to the end; returns their results in order. No other request may be pending."""
        assert not self._pending, "results of other requests would be lost"
        request_ids = [self.submit(request) for request in requests]
        found: dict[int, GenerationResult] = {}
        while self._pending:
            found |= {result.request_id: result for result in self.step()}
        return [found[request_id] for request_id in request_ids]

    def cancel(self, request_id: int) -> None:
        """Cancel a request; does nothing if it is finished."""
        self._pending.pop(request_id, None)
        self._scheduler.remove(request_id)
        self._scores.pop(request_id, None)

    def cancel_all(self) -> None:
        """Cancel all requests. Also resynchronizes ranks that have made different calls."""
        for request_id in list(self._pending):
            self.cancel(request_id)
        self._request_ids = count()

    def weights_changed(self, version: int, adapter: str | None = None) -> None:
        """Notify the sampler that an adapter's weights (None: the model's) changed; `version` identifies the new ones.

        Cache entries of the old weights are not used again. Running samples keep their tokens and continue with the
        new weights.
        """
        self._versions[adapter] = version
        self._num_changes[adapter] += 1
        affected = [c for c in self._scheduler.running if adapter in (None, c.request.adapter)]
        for continuation in reversed(affected):
            self._scheduler.preempt(continuation)
        if adapter is None:
            self._pool.forget_keys()

    def release_memory(self) -> None:
        """Free the memory of the cache and of gathered parameters.

        The next step recomputes the tokens of running samples.
        """
        for continuation in reversed(list(self._scheduler.running)):
            self._scheduler.preempt(continuation)
        self._pool.forget_keys()
        self._cache = self._decode = None
        self._model.drop_gathered()

    def check(self, request: GenerationRequest) -> None:
        """Raise ValueError if the sampler cannot run a request."""
        config = self._decoder.config
        self.check_length(len(request.prompt), request.max_tokens)
        targets = () if request.target_tokens is None else request.target_tokens.ravel().tolist()
        biased = () if request.edits is None else request.edits.bias
        for name, tokens, lowest in (
            ("prompt", request.prompt, 0),
            ("target_tokens", targets, -1),
            ("logit_bias", biased, 0),
        ):
            if outside := [token for token in tokens if not lowest <= token < config.vocab_size]:
                raise ValueError(f"{name}: token {outside[0]} is outside the vocabulary of {config.vocab_size}")
        most = max(request.top_prompt_logprobs, request.top_sample_logprobs)
        if most > config.vocab_size:
            raise ValueError(f"{most} most likely tokens were requested from a vocabulary of {config.vocab_size}")
        if (request.prompt_routes or request.sample_routes) and self._decoder.routers is None:
            raise ValueError("routed_experts: the model has no experts; leave them out")
        if request.adapter is not None and (self._bank is None or request.adapter not in self._bank.names):
            known = ", ".join(map(repr, self._bank.names if self._bank is not None else ()))
            raise ValueError(f"adapter: there is no {request.adapter!r}; there are {known or 'none'}")

    def _step_this_rank(self) -> list[GenerationResult]:
        """Run a step on this rank; returns the results of the requests that it finished."""
        spans = self._scheduler.plan()
        # The tokens of an adapter must be adjacent.
        spans.sort(key=_adapter_order)
        return self._advance(spans, self._compute(spans))

    def _step_all_ranks(self, cancelled: Sequence[int]) -> tuple[list[GenerationResult], list[int]]:
        """Run a step on all ranks; returns all ranks' results, sorted by id, and all ids that any rank cancels."""
        with all_or_none("a step of the sampler") as num_reported:
            finished = self._step_this_rank()
            num_reported.number += len(finished) + len(cancelled)
        if not num_reported.number:
            return [], []
        reports: list[tuple[list[GenerationResult], Sequence[int]]] = [([], ()) for _ in range(self._num_ranks)]
        dist.all_gather_object(reports, (finished, cancelled))
        results = chain.from_iterable(finished for finished, _ in reports)
        ended = chain.from_iterable(cancelled for _, cancelled in reports)
        return sorted(results, key=lambda result: result.request_id), list(ended)

    def _key_root(self, adapter: str | None) -> bytes:
        return repr((adapter, self._num_changes[None], self._num_changes[adapter])).encode()

    @torch.no_grad()
    def _compute(self, spans: Sequence[TokenSpan]) -> dict[TokenSpan, tuple[Drawn, int]]:
        """Compute the spans and draw the next token of each sample that needs one; returns (Drawn, row) by span.

        Decode spans run first, in a separate pass: they do not depend on the others, and starting samples may share
        blocks that they write. But if parameters are gathered or tokens exchanged during a pass, all ranks take part in
        it, so each rank makes exactly one pass with all its spans.
        """
        if self._cache is None:
            self._cache, self._decode = self._allocate()
        stays_gathered = self._model.is_gathered and (self._keep_gathered or not self._model.is_sharded)
        computes_alone = stays_gathered and not self._model.divides_experts
        decoding = [span for span in spans if span.is_decode]
        others = [span for span in spans if not span.is_decode]
        if self._decode is None or (others and not computes_alone):
            decoding, others = [], list(spans)
        drawn: dict[TokenSpan, tuple[Drawn, int]] = {}
        if decoding and self._decode is not None:
            drawn |= self._decode_spans(decoding, self._decode)
        if others:
            drawn |= self._forward(others, self._cache)
        if not spans and not computes_alone:
            self._forward_dummy()
        return drawn

    def _decode_spans(self, spans: Sequence[TokenSpan], decode: DecodePass) -> Mapping[TokenSpan, tuple[Drawn, int]]:
        choice = None
        if self._bank is not None:
            runs = _runs(spans)
            adapter, length = runs.pop()
            choice = self._bank.activate([*runs, (adapter, length + decode.num_rows(len(spans)) - len(spans))])
        logits, routes = decode.logits(
            [span.continuation.tokens[span.start] for span in spans],
            [span.continuation.blocks for span in spans],
            [span.stop for span in spans],
            _slots(spans),
            choice,
            records=need_routes(spans),
        )
        add_routes(spans, routes)
        return self._draw(logits, spans)

    def _forward(self, spans: Sequence[TokenSpan], cache: KeyValueCache) -> Mapping[TokenSpan, tuple[Drawn, int]]:
        layout = MixedLayout(
            cache,
            tables=[span.continuation.blocks for span in spans],
            new=[span.stop - span.start for span in spans],
            totals=[span.stop for span in spans],
            device=self._device,
            slots=_slots(spans),
        )
        tokens = [token for span in spans for token in span.continuation.tokens[span.start : span.stop]]
        if self._bank is not None:
            self._bank.activate(_runs(spans))
        routers = self._decoder.routers if need_routes(spans) else None
        with (
            self._model.generation(keep_gathered=self._keep_gathered),
            nullcontext() if routers is None else routers.recording(),
        ):
            drawn = self._model.forward(
                torch.tensor(tokens, device=self._device),
                layout,
                loss=lambda hidden, head: self._score_and_draw(hidden, head, spans, layout.offsets.tolist()),
            )
            add_routes(spans, None if routers is None else routers.take_routes())
        return drawn

    def _forward_dummy(self) -> None:
        """Compute a dummy token, to take part in the collectives of a pass in which this rank has no work."""
        with self._model.generation(keep_gathered=self._keep_gathered):
            if self._bank is not None:
                self._bank.activate([(None, 1)])
            layout = SequenceLayout.from_lengths([1], self._device)
            self._model.forward(torch.zeros(1, dtype=torch.int64, device=self._device), layout)

    def _score_and_draw(
        self, hidden: Tensor, head: HeadWeight, spans: Sequence[TokenSpan], offsets: Sequence[int]
    ) -> Mapping[TokenSpan, tuple[Drawn, int]]:
        """Score prompts and draw tokens while the head's weight is gathered. hidden: [T, D]."""
        ends: dict[TokenSpan, int] = {}
        for span, start, stop in zip(spans, offsets, offsets[1:], strict=False):
            if span.continuation.first_scored is not None:
                self._scores[span.continuation.request_id].add(hidden[start:stop], head, span.start)
            if span.is_last and span.continuation.request.max_tokens:
                ends[span] = stop - 1
        if not ends:
            return {}
        rows = hidden[torch.tensor(list(ends.values()), device=hidden.device)]
        return self._draw(wide_logits(rows, head), list(ends))

    def _draw(self, logits: Tensor, spans: Sequence[TokenSpan]) -> Mapping[TokenSpan, tuple[Drawn, int]]:
        """Draw a token for each span from its row of logits [R, V]."""
        rules = [_rule(span.continuation) for span in spans]
        num_top = max(span.continuation.request.top_sample_logprobs for span in spans)
        drawn = draw(logits, rules, num_top)
        return {span: (drawn, row) for row, span in enumerate(spans)}

    def _advance(
        self, spans: Sequence[TokenSpan], drawn: Mapping[TokenSpan, tuple[Drawn, int]]
    ) -> list[GenerationResult]:
        """Append drawn tokens, release finished samples, and return the results of finished requests."""
        finished: list[GenerationResult] = []
        for span in spans:
            continuation = span.continuation
            continuation.num_cached = span.stop
            if not span.is_last:
                continue
            continuation.first_scored = None
            if span in drawn:
                self._append(continuation, *drawn[span])
            else:
                continuation.finish_reason = "length"
            if continuation.finish_reason is not None:
                self._scheduler.finish(continuation)
                siblings = self._pending[continuation.request_id]
                if all(one.finish_reason is not None for one in siblings):
                    finished.append(self._finish(continuation.request_id))
        return finished

    def _append(self, continuation: Continuation, drawn: Drawn, row: int) -> None:
        request = continuation.request
        continuation.add_token(int(drawn.tokens[row]))
        continuation.logprobs.append(float(drawn.logprobs[row]))
        version = self._versions.get(request.adapter, 0)
        continuation.versions = [*continuation.versions[:1], version]
        if num_top := request.top_sample_logprobs:
            top = drawn.top_tokens[row, :num_top].int().numpy(), drawn.top_logprobs[row, :num_top].numpy()
            continuation.top_tokens.append(top)
        if any(_ends_with(continuation, sequence) for sequence in request.stop) or (
            request.is_end is not None
            and request.is_end(continuation.tokens[len(request.prompt) - request.num_continued :])
        ):
            continuation.finish_reason = "stop"
        elif continuation.problem is not None or continuation.num_sampled == request.max_tokens:
            continuation.finish_reason = "length"

    def _finish(self, request_id: int) -> GenerationResult:
        continuations = self._pending[request_id]
        scores = self._scores.pop(request_id, None)
        return GenerationResult(
            request_id,
            samples=tuple(_sample(one) for one in continuations if one.request.max_tokens),
            prompt_logprobs=None if scores is None else scores.prompt_logprobs,
            top_prompt_logprobs=None if scores is None else scores.top_prompt_logprobs,
            target_logprobs=None if scores is None else scores.target_logprobs,
            prompt_draws=None if scores is None else scores.prompt_draws,
            num_cached_tokens=continuations[0].num_cache_hits or 0,
            prompt_routes=prompt_routes(continuations[0]),
            problem=next((one.problem for one in continuations if one.problem is not None), None),
        )

    def _allocate(self) -> tuple[KeyValueCache, DecodePass | None]:
        """The cache and, if the device supports them, decode passes over it."""
        config = self._decoder.config
        # One block and one slot more for the padding rows of recorded passes.
        cache = make_cache(self._decoder, self._device, BLOCK_SIZE, self._pool.num_blocks + 1, self._max_running + 1)
        requests = config.attention_requests(self._device.type, self._decoder.compute_dtype)
        if any(decode_refusal(each) is not None for each in requests.values()):
            return cache, None
        decode = DecodePass(
            self._model,
            cache,
            max_samples=self._max_running,
            max_tokens=self._limit,
            device=self._device,
            keep_gathered=self._keep_gathered,
        )
        return cache, decode


def _limit(config: DecoderConfig, cache_tokens: int) -> tuple[int, str]:
    """The maximum number of computed tokens of one sample, and its reason as a relative clause."""
    limit, reason = cache_tokens, "is what the cache holds (sampler_cache_tokens)"
    if config.max_position_embeddings < limit:
        limit, reason = config.max_position_embeddings, POSITIONS
    ropes = (each.rope for each in config.attentions if each.rope is not None)
    for rope in ropes:
        if rope.depends_on_length and rope.trained_length < limit:
            limit, reason = (
                rope.trained_length,
                f"is what {rope.kind} rotary positions support without changing cached keys",
            )
    return limit, reason


def _slots(spans: Sequence[TokenSpan]) -> list[int]:
    return [slot for span in spans if (slot := span.continuation.slot) is not None]


def _adapter_order(span: TokenSpan) -> tuple[bool, str]:
    adapter = span.continuation.request.adapter
    return adapter is not None, adapter or ""


def _runs(spans: Sequence[TokenSpan]) -> list[tuple[str | None, int]]:
    """The number of tokens of each adapter, as (adapter, tokens) in the order of the spans."""
    lengths: dict[str | None, int] = {}
    for span in spans:
        adapter = span.continuation.request.adapter
        lengths[adapter] = lengths.get(adapter, 0) + span.stop - span.start
    return list(lengths.items())


def _rule(continuation: Continuation) -> DrawRule:
    request = continuation.request
    position = request.num_continued + continuation.num_sampled
    number = uniform_number(request.seed + continuation.index, position)
    return DrawRule(request.temperature, request.top_k, request.top_p, number, continuation.edits)


def _ends_with(continuation: Continuation, sequence: Sequence[int]) -> bool:
    """Whether the sampled tokens, without the prompt's, end with `sequence`."""
    length = len(sequence)
    return length <= continuation.num_sampled and continuation.tokens[-length:] == list(sequence)


def _sample(continuation: Continuation) -> GeneratedSample:
    assert continuation.finish_reason is not None
    top = None
    if continuation.request.top_sample_logprobs:
        token_ids, logprobs = zip(*continuation.top_tokens, strict=True)
        top = LikelyTokens(np.stack(token_ids), np.stack(logprobs))
    return GeneratedSample(
        tokens=tuple(continuation.tokens[len(continuation.request.prompt) :]),
        logprobs=np.array(continuation.logprobs, np.float32),
        finish_reason=continuation.finish_reason,
        top_logprobs=top,
        versions=(continuation.versions[0], continuation.versions[-1]),
        routes=sample_routes(continuation),
    )
