"""Draws samples for clients with the embedded sampler: from the base, weights kept in memory, and checkpoints."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from xorl.data import TextTokenizer, load_tokenizer
from xorl.lora import AdapterBank
from xorl.server.collectives import all_or_none
from xorl.server.datum import Array
from xorl.server.identifiers import CheckpointRef
from xorl.server.messages import CANCELLED
from xorl.server.operations import (
    BaseSampler,
    CheckpointSampler,
    Failure,
    Sample,
    SampledSequence,
    SampleResult,
    SamplerRef,
    SnapshotSampler,
    TopLogprobs,
)
from xorl.server.sampler import Sampler, SampleRequest, cache_bytes_per_token
from xorl.server.sampler import SampleResult as Sampled
from xorl.server.sampler import TopLogprobs as Likeliest
from xorl.server.worker.base import Base
from xorl.server.worker.models import Models
from xorl.server.worker.saved_models import SavedModels

# Of a device's memory, the share that the cache of keys and values may take; and never more than so many contexts.
CACHE_SHARE = 0.1
CACHE_CONTEXTS = 64
# Samples for which it is worth to compute their prompt once more, on a rank that would have nothing to do.
MIN_SHARE = 4


class Drawing(NamedTuple):
    """An operation, by its id, as a request to the sampler, and what it samples from (`Sampling.source_of`)."""

    operation_id: str
    request: SampleRequest
    source: str | None


class Sampling:
    """The sampler over the worker's models. A source's name is what the cache knows its weights by."""

    def __init__(self, base: Base, models: Models, saved: SavedModels, bank: AdapterBank | None) -> None:
        self._base = base
        self._models = models
        self._saved = saved
        self._sampler = Sampler(
            base.model,
            device=base.device,
            cache_tokens=base.config.sampler_cache_tokens or _cache_tokens(base),
            # Else every token of every sample would gather the whole model again. Training frees it.
            keep_gathered=True,
            is_dealt=base.place.world_size > 1,
            bank=bank,
        )
        self._has_gathered = False
        self._num_changes = 0
        self._current: str | None = None

    def source_of(self, ref: SamplerRef) -> str | None:
        """What `run` samples from; None is the base. Collective: a checkpoint that is not held is read.

        Raises UnknownName where it is not there.
        """
        if isinstance(ref, BaseSampler):
            return None
        if isinstance(ref, SnapshotSampler):
            return self._models.kept(ref.model_id, ref.sampler_id)
        if not isinstance(ref, CheckpointSampler):
            raise ValueError(f"workers sample from what a {type(ref).__name__} stands for, which the orchestrator says")
        source = ref.checkpoint.uri("xorl")
        if not self._models.is_held(source):
            try:
                with all_or_none(f"reading {source}"):
                    self._saved.hold(source, ref.checkpoint)
            except BaseException:
                self._models.release(source)
                raise
        return source

    def saved(self, ref: CheckpointRef) -> None:
        """Called when a checkpoint was saved, perhaps in place of an older one of the same name.

        The older one may still be held in memory, and keys and values computed with it may be in the cache.
        """
        source = ref.uri("xorl")
        self._models.release(source)
        self.changed(source)

    def request(self, operation: Sample, operation_id: str, source: str | None) -> SampleRequest:
        """The operation as a request to the sampler. Raises ValueError for what the sampler cannot do."""
        prompt = tuple(operation.prompt.numpy().tolist())
        limit = self._sampler.limit
        # The last token of a sample needs no place.
        room = limit - len(prompt) + 1
        if operation.max_tokens is None and room < 1:
            raise ValueError(f"prompt: {len(prompt)} tokens are more than the {limit} that there is room for")
        ends = () if operation.ignore_end else self.end_tokens
        targets = operation.target_prompt_tokens
        return SampleRequest(
            prompt,
            room if operation.max_tokens is None else operation.max_tokens,
            seed=_seed_of(operation_id) if operation.seed is None else operation.seed,
            num_samples=operation.num_samples,
            temperature=operation.temperature,
            top_k=operation.top_k,
            top_p=operation.top_p,
            stop=tuple((token,) for token in (*operation.stop_ids, *ends)),
            is_end=self._ends_with(operation.stop_strings) if operation.stop_strings else None,
            adapter=source if self._models.samples_together else None,
            prompt_logprobs=operation.prompt_logprobs,
            top_prompt_logprobs=operation.topk_prompt_logprobs,
            top_sample_logprobs=operation.topk_sample_logprobs,
            target_tokens=None if targets is None else targets.numpy().astype(np.int64),
        )

    def run(self, drawings: Sequence[Drawing], cancelled: Container[str] = ()) -> list[SampleResult | Failure]:
        """The results of requests that can be sampled together; collective. If it fails on any rank, it fails on all.

        If a model computes NaN, its own requests fail, and no others. cancelled: asked at each step for the ids of
        operations to end there and then; it is enough that one rank has them.
        """
        sources = [drawing.source for drawing in drawings]
        if not self._models.samples_together and sources[0] != self._current:
            self.changed()
            self._current = sources[0]
        self._has_gathered = True
        with ExitStack() as entered:
            try:
                # It may fail here alone; others must not begin to step then.
                with all_or_none("preparing to sample"):
                    entered.enter_context(self._models.sampling(sources))
                    # The sampler deals them to the ranks in turn: where these are more than the requests, some would
                    # have none.
                    max_shares = self._base.place.world_size // len(drawings)
                    shared = [_shares(drawing.request, max_shares) for drawing in drawings]
                    pending = [[self._sampler.submit(share) for share in shares] for shares in shared]
                found: dict[int, Sampled] = {}
                running = {drawing.operation_id: ids for drawing, ids in zip(drawings, pending, strict=True)}
                while self._sampler.num_pending:
                    gone = [running.pop(name) for name in list(running) if name in cancelled]
                    finished = self._sampler.step(list(chain.from_iterable(gone)))
                    found |= {result.request_id: result for result in finished}
            except BaseException:
                self._sampler.cancel_all()
                self._sampler.forget()
                self._base.model.recover()
                raise
        return [
            _result(Sampled.of_shares([found[request_id] for request_id in ids]))
            if found.keys() >= {*ids}
            else CANCELLED
            for ids in pending
        ]

    def check(self, request: SampleRequest) -> None:
        """Raise ValueError for a request that this model cannot continue."""
        self._sampler.cancel(self._sampler.submit(request))

    def changed(self, source: str | None = None) -> None:
        """Called when the weights of a source, or with None those of the model, have changed."""
        self._num_changes += 1
        # Sources that cannot be sampled together are all the base to the sampler.
        self._sampler.weights_changed(self._num_changes, source if self._models.samples_together else None)

    def before_training(self) -> None:
        """Free the parameters that generation left gathered."""
        if self._has_gathered:
            self._base.model.drop_gathered()
            self._has_gathered = False

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """The model's end tokens, as its files name them."""
        architecture = self._base.architecture
        found = _ids(architecture.hf_config.get("eos_token_id"))
        folder = architecture.tokenizer_folder
        if folder is not None and (file := folder / "generation_config.json").is_file():
            found += _ids(json.loads(file.read_text()).get("eos_token_id"))
        if not found and folder is not None and (folder / "tokenizer.json").is_file():
            found += _ids(self._tokenizer.eos_id)
        return tuple(dict.fromkeys(found))

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        folder = self._base.architecture.tokenizer_folder
        if folder is None:
            raise ValueError("stop: strings need the model's tokenizer, and it has none: give token ids")
        return load_tokenizer(folder)

    def _ends_with(self, strings: Sequence[str]) -> Callable[[Sequence[int]], bool]:
        core = self._tokenizer.core
        # A token has at least one byte of the text, but for parts of characters at both ends.
        width = max(len(string.encode()) for string in strings) + 8

        def is_end(tokens: Sequence[int]) -> bool:
            text = core.decode(list(tokens[-width:]), skip_special_tokens=False)
            return any(string in text for string in strings)

        return is_end


def _shares(request: SampleRequest, max_shares: int) -> list[SampleRequest]:
    """A request in as many parts as are worth it."""
    num_samples = request.num_samples if request.max_tokens else 1
    return request.shares(max(min(max_shares, num_samples // MIN_SHARE), 1))


def _cache_tokens(base: Base) -> int:
    config = base.architecture.config
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if base.device.type == "cuda":
        total = torch.cuda.get_device_properties(base.device).total_memory
    tokens = int(CACHE_SHARE * total / cache_bytes_per_token(config, base.module.compute_dtype))
    return min(tokens, CACHE_CONTEXTS * config.max_position_embeddings)


def _seed_of(operation_id: str) -> int:
    """A seed that depends on the operation alone, so that it is the same if the operation runs again."""
    return int.from_bytes(hashlib.blake2b(operation_id.encode(), digest_size=7).digest(), "big")


def _ids(value: object) -> list[int]:
    """A list, from what a configuration may hold: one token, several, or none."""
    if isinstance(value, int):
        return [value]
    return [token for token in value if isinstance(token, int)] if isinstance(value, list) else []


def _result(sampled: Sampled) -> SampleResult | Failure:
    if _has_diverged(sampled):
        # No matter of the service's: what was drawn of it is no sample, and what comes next would be neither.
        return Failure(
            "user",
            400,
            "the model's logits are no numbers (NaN), so there is nothing to sample: it has diverged; go back to a "
            "checkpoint from before, and train on with a lower learning rate",
        )
    return SampleResult(
        sequences=[
            SampledSequence(
                Array.of(np.array(sample.tokens, np.int32)),
                Array.of(sample.logprobs.astype(np.float32)),
                sample.finish_reason,
                _top(sample.top_logprobs),
                sample.versions,
            )
            for sample in sampled.samples
        ],
        prompt_logprobs=_optional(sampled.prompt_logprobs),
        topk_prompt_logprobs=_top(sampled.top_prompt_logprobs),
        target_prompt_logprobs=_optional(sampled.target_logprobs),
        num_cached_tokens=sampled.num_cached_tokens,
    )


def _has_diverged(sampled: Sampled) -> bool:
    """Whether there are tokens whose log-probability is NaN; that of an impossible one is -inf, as it should be."""
    found = [one.logprobs for one in sampled.samples]
    if sampled.prompt_logprobs is not None:
        # The first token has none, which is NaN, too.
        found.append(sampled.prompt_logprobs[1:])
    return any(bool(np.isnan(logprobs).any()) for logprobs in found)


def _optional(values: NDArray[np.float32] | None) -> Array | None:
    return None if values is None else Array.of(values.astype(np.float32))


def _top(top: Likeliest | None) -> TopLogprobs | None:
    if top is None:
        return None
    return TopLogprobs(Array.of(top.token_ids.astype(np.int32)), Array.of(top.logprobs.astype(np.float32)))
