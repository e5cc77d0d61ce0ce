"""Samples with the embedded sampler from the base and from checkpoints, which may still be in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xorl.data.formats import TextTokenizer, load_tokenizer
from xorl.lora import AdapterBank
from xorl.server.collectives import all_or_none
from xorl.server.datum import Array
from xorl.server.identifiers import CheckpointRef
from xorl.server.messages import CANCELLED, Suspended
from xorl.server.operations import (
    NO_LOGPROB,
    BaseSampler,
    CheckpointSampler,
    Failure,
    Sample,
    SampledSequence,
    SampleResult,
    SamplerRef,
    TopLogprobs,
)
from xorl.server.sampler import (
    DIVERGED,
    EditRules,
    GenerationRequest,
    GenerationResult,
    LikelyTokens,
    Sampler,
    default_cache_tokens,
)
from xorl.server.worker.base import Base
from xorl.server.worker.models import Models
from xorl.server.worker.routes import RoutedLayers
from xorl.server.worker.saved_models import SavedModels
from xorl.train.end_tokens import end_tokens_of

if TYPE_CHECKING:
    from xorl.server.sampler.grammar import Grammars

# The minimum number of samples for an idle rank, which must compute the prompt again for them.
MIN_SHARE = 4
# The maximum number of unclaimed results of suspended calls; more than the orchestrator has in flight.
MAX_UNCLAIMED = 1024


class SampleCall(NamedTuple):
    """The sampler's request for an operation, and the source that it samples from (`WorkerSampler.source_of`)."""

    operation_id: str
    request: GenerationRequest
    source: str | None


class _Running(NamedTuple):
    """A call in the sampler: its source, and the sampler's requests."""

    source: str | None
    request_ids: tuple[int, ...]


class WorkerSampler:
    """The sampler over the worker's models. The KV cache identifies weights by the name of their source."""

    def __init__(self, base: Base, models: Models, saved: SavedModels, bank: AdapterBank | None) -> None:
        self._base = base
        self._models = models
        self._saved = saved
        self._routed = RoutedLayers.of(base.architecture.config)
        self._sampler = Sampler(
            base.model,
            device=base.device,
            cache_tokens=base.config.sampler_cache_tokens or default_cache_tokens(base.module, base.device),
            # Otherwise each step would gather the whole model again. Training frees it (`before_training`).
            keep_gathered=True,
            is_distributed=base.runtime.world_size > 1,
            bank=bank,
        )
        # Calls that have begun, by their operation's id, and results of the sampler that have not been returned yet.
        self._running: dict[str, _Running] = {}
        self._found: dict[int, GenerationResult] = {}
        self._has_gathered = False
        self._num_changes = 0
        self._loaded_source: str | None = None

    def source_of(self, ref: SamplerRef) -> str | None:
        """The source to sample from; None is the base. Collective: reads a checkpoint that is not in memory.

        Raises UnknownName if the checkpoint does not exist.
        """
        if isinstance(ref, BaseSampler):
            return None
        if not isinstance(ref, CheckpointSampler):
            raise ValueError(f"the orchestrator must resolve a {type(ref).__name__} before workers can sample from it")
        source = ref.checkpoint.uri("xorl")
        if not self._models.has_source(source):
            try:
                with all_or_none(f"reading {source}"):
                    self._saved.load_source(source, ref.checkpoint)
            except BaseException:
                self._models.release_source(source)
                raise
        return source

    def checkpoint_saved(self, ref: CheckpointRef) -> None:
        """Call this when a checkpoint was saved. It may have replaced one of the same name.

        The old one may still be in memory, and the cache may hold keys and values computed with it.
        """
        source = ref.uri("xorl")
        for name in [name for name, running in self._running.items() if running.source == source]:
            self._drop(name)
        self._models.release_source(source)
        self.weights_changed(source)

    def keep_weights(self, model_id: str, ref: CheckpointRef) -> None:
        """Keep a model's weights in memory as the source of the checkpoint that they were just saved to. Collective."""
        source = ref.uri("xorl")
        try:
            with all_or_none("keeping the weights"):
                self._models.snapshot(model_id, source)
        except BaseException:
            self._models.release_source(source)
            raise
        self._release_idle_sources()

    def request(self, operation: Sample, operation_id: str, source: str | None) -> GenerationRequest:
        """The sampler's request for an operation. Raises ValueError if the sampler cannot run it."""
        sizes = {"tensor_parallel_size": self._base.mesh.dims.tp, "pipeline_parallel_size": self._base.mesh.dims.pp}
        for option, size in sizes.items():
            if size > 1:
                raise ValueError(
                    f"the embedded sampler does not run while {option} is above 1: sample with an inference endpoint "
                    "(inference_endpoints)"
                )
        prompt = tuple(operation.prompt.numpy().tolist())
        limit = self._sampler.limit
        # The last token of a sample is not computed and needs no room in the cache.
        room = limit - len(prompt) + 1
        if operation.max_tokens is None:
            # At least one token, so that a prompt that fills the context is refused.
            self._sampler.check_length(len(prompt), 1)
        ends = () if operation.ignore_end else self.end_tokens
        targets = operation.target_prompt_tokens
        request = GenerationRequest(
            prompt,
            room if operation.max_tokens is None else operation.max_tokens,
            seed=_seed_of(operation_id) if operation.seed is None else operation.seed,
            num_samples=operation.num_samples,
            num_continued=operation.num_continued,
            temperature=operation.temperature,
            top_k=operation.top_k,
            top_p=operation.top_p,
            edits=self._edits(operation),
            stop=tuple((token,) for token in (*operation.stop_ids, *ends)),
            is_end=self._ends_with(operation.stop_strings) if operation.stop_strings else None,
            adapter=source if self._models.samples_together else None,
            prompt_logprobs=operation.prompt_logprobs,
            top_prompt_logprobs=operation.topk_prompt_logprobs,
            top_sample_logprobs=operation.topk_sample_logprobs,
            num_prompt_scored=operation.num_prompt_scored,
            prompt_draws=operation.prompt_draws,
            target_tokens=None if targets is None else targets.numpy().astype(np.int64),
            prompt_routes=operation.routed_experts,
            sample_routes=operation.routed_experts,
        )
        self._sampler.check(request)
        return request

    def run(
        self,
        calls: Sequence[SampleCall],
        cancelled: Container[str] = (),
        wants_pause: Callable[[], bool] = lambda: False,
    ) -> list[SampleResult | Suspended | Failure]:
        """The results of requests that can be sampled together; collective. If it fails on any rank, it fails on all.

        If a model computes NaN, only its requests fail. Suspended calls continue when they are passed again, and also
        advance beside the calls that are passed in between. Only rank 0's `cancelled` and `wants_pause` are used, at
        each step. cancelled: the ids of operations to cancel. wants_pause: whether to suspend the calls that are not
        finished.
        """
        sources = [call.source for call in calls]
        if not self._models.samples_together and sources[0] != self._loaded_source:
            self.weights_changed()
            self._loaded_source = sources[0]
        self._has_gathered = True
        with ExitStack() as entered:
            try:
                # This may fail on one rank only; the others must not start to step then.
                with all_or_none("preparing to sample"):
                    entered.enter_context(self._models.sampling_from(sources))
                    self._submit(calls)
                while not self._have_ended(calls):
                    self._base.position.move()
                    ended = [running.request_ids for name, running in self._running.items() if name in cancelled]
                    finished = self._sampler.step(list(chain.from_iterable(ended)))
                    self._found |= {result.request_id: result for result in finished}
                    # With full weights, the model itself holds the source, so other samples would continue with it.
                    if self._models.samples_together and self._agreed(wants_pause):
                        break
            except BaseException:
                self._sampler.cancel_all()
                self._running.clear()
                self._found.clear()
                self._sampler.release_memory()
                self._base.model.recover()
                raise
        results = [self._result_of(call) for call in calls]
        self._forget_ended()
        self._release_idle_sources()
        return results

    def _submit(self, calls: Sequence[SampleCall]) -> None:
        """Pass new calls to the sampler; drop suspended calls whose source is gone, so that they begin again."""
        for name, running in list(self._running.items()):
            if running.source is not None and not self._models.has_source(running.source):
                self._drop(name)
        # The sampler assigns requests to ranks in turn. With fewer requests than ranks, some would be idle, so requests
        # are split.
        max_shares = self._base.runtime.world_size // len(calls)
        for call in calls:
            if call.operation_id not in self._running:
                shares = _shares(call.request, max_shares)
                request_ids = tuple(self._sampler.submit(share) for share in shares)
                self._running[call.operation_id] = _Running(call.source, request_ids)

    def _have_ended(self, calls: Sequence[SampleCall]) -> bool:
        return all(self._has_ended(self._running[call.operation_id]) for call in calls)

    def _has_ended(self, running: _Running) -> bool:
        return not any(map(self._sampler.is_pending, running.request_ids))

    def _agreed(self, wants_pause: Callable[[], bool]) -> bool:
        """Whether rank 0 wants a pause. Collective."""
        with all_or_none("a pause of the sampler") as votes:
            votes.number = int(wants_pause())
        return votes.number > 0

    def _result_of(self, call: SampleCall) -> SampleResult | Suspended | Failure:
        running = self._running[call.operation_id]
        if not self._has_ended(running):
            return Suspended(sum(map(self._sampler.done, running.request_ids)) / len(running.request_ids))
        del self._running[call.operation_id]
        found = [self._found.pop(request_id, None) for request_id in running.request_ids]
        whole = [result for result in found if result is not None]
        if len(whole) < len(found):
            return CANCELLED
        return _result(call.request, GenerationResult.of_shares(whole), self._routed)

    def _forget_ended(self) -> None:
        """Drop suspended calls that were cancelled, and the oldest finished ones that no one has asked for."""
        ended = [name for name, running in self._running.items() if self._has_ended(running)]
        cancelled = [name for name in ended if not self._found.keys() >= {*self._running[name].request_ids}]
        for name in [*cancelled, *[name for name in ended if name not in cancelled][:-MAX_UNCLAIMED]]:
            self._drop(name)

    def _release_idle_sources(self) -> None:
        """Keep the sources of suspended calls. Without its source, a call would begin again in each of its turns."""
        self._models.release_idle_sources({running.source for running in self._running.values()})

    def _drop(self, name: str) -> None:
        """Forget a call. If it is passed again, it begins again."""
        for request_id in self._running.pop(name).request_ids:
            self._sampler.cancel(request_id)
            self._found.pop(request_id, None)

    def weights_changed(self, source: str | None = None) -> None:
        """Call this when the weights of a source changed; None: the model's."""
        self._num_changes += 1
        # If sources cannot be sampled together, their weights are put into the base, one source at a time.
        self._sampler.weights_changed(self._num_changes, source if self._models.samples_together else None)

    def before_training(self) -> None:
        """Free the parameters that generation left gathered."""
        if self._has_gathered:
            self._base.model.drop_gathered()
            self._has_gathered = False

    def _edits(self, operation: Sample) -> EditRules | None:
        rules = EditRules(
            bias={token: value for token, value in operation.logit_bias if value},
            repetition=operation.repetition_penalty,
            frequency=operation.frequency_penalty,
            presence=operation.presence_penalty,
            grammar=None if operation.form is None else self._grammars.matcher(operation.form, operation.stop_ids),
        )
        return None if rules == EditRules() else rules

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """The model's end tokens."""
        return end_tokens_of(self._base.architecture)

    @cached_property
    def _tokenizer(self) -> TextTokenizer | None:
        folder = self._base.architecture.tokenizer_folder
        return None if folder is None else load_tokenizer(folder)

    @cached_property
    def _grammars(self) -> Grammars:
        try:
            # Imports llguidance, an extra.
            from xorl.server.sampler.grammar import Grammars  # noqa: PLC0415
        except ImportError as error:
            raise ValueError(str(error)) from error
        if self._tokenizer is None:
            raise ValueError("answers of a given format need a tokenizer, which the model does not have")
        return Grammars(self._tokenizer.core, self._base.architecture.config.vocab_size, self.end_tokens)

    def _ends_with(self, strings: Sequence[str]) -> Callable[[Sequence[int]], bool]:
        if self._tokenizer is None:
            raise ValueError("stop: strings need a tokenizer, which the model does not have: pass token ids")
        core = self._tokenizer.core
        # Each token has at least one byte of the text; 8 more for characters that are cut at both ends.
        width = max(len(string.encode()) for string in strings) + 8

        def is_end(tokens: Sequence[int]) -> bool:
            text = core.decode(list(tokens[-width:]), skip_special_tokens=False)
            return any(string in text for string in strings)

        return is_end


def _shares(request: GenerationRequest, max_shares: int) -> list[GenerationRequest]:
    """Splits a request into at most `max_shares` parts of at least MIN_SHARE samples."""
    num_samples = request.num_samples if request.max_tokens else 1
    return request.shares(max(min(max_shares, num_samples // MIN_SHARE), 1))


def _seed_of(operation_id: str) -> int:
    """A seed that depends only on the operation's id, so that the operation gives the same result if it runs again."""
    return int.from_bytes(hashlib.blake2b(operation_id.encode(), digest_size=7).digest(), "big")


def _result(
    request: GenerationRequest, sampled: GenerationResult, routed: RoutedLayers | None
) -> SampleResult | Failure:
    if sampled.has_diverged(request):
        # Not a fault of the service, and a retry would give the same.
        return Failure("user", 400, DIVERGED)
    if sampled.problem is not None:
        return Failure(
            "user", 400, f"the answer cannot follow its schema to the end: {sampled.problem}; simplify the schema"
        )
    return SampleResult(
        sequences=[
            SampledSequence(
                Array.of(np.array(sample.tokens, np.int32)),
                Array.of(sample.logprobs.astype(np.float32)),
                sample.finish_reason,
                _top(sample.top_logprobs),
                sample.versions,
                _routes(sample.routes, routed),
            )
            for sample in sampled.samples
        ],
        prompt_logprobs=_optional(sampled.prompt_logprobs),
        topk_prompt_logprobs=_top(sampled.top_prompt_logprobs),
        prompt_draws=_top(sampled.prompt_draws),
        target_prompt_logprobs=_optional(sampled.target_logprobs),
        num_cached_tokens=sampled.num_cached_tokens,
        prompt_routed_experts=_routes(sampled.prompt_routes, routed),
    )


def _optional(values: NDArray[np.float32] | None) -> Array | None:
    return None if values is None else Array.of(values.astype(np.float32))


def _routes(routes: NDArray[np.int16] | None, routed: RoutedLayers | None) -> Array | None:
    return None if routes is None or routed is None else routed.of_all_layers(routes, np.int16)


def _top(top: LikelyTokens | None) -> TopLogprobs | None:
    if top is None:
        return None
    logprobs = np.nan_to_num(top.logprobs.astype(np.float32), nan=NO_LOGPROB, neginf=-np.inf)
    return TopLogprobs(Array.of(top.token_ids.astype(np.int32)), Array.of(logprobs))
