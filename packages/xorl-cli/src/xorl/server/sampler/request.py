"""The sampler's requests and results, independent of the model.

Shapes: P tokens of the prompt, N tokens of a sample, K scored tokens per position. Routes are [.., layers with experts,
experts per token].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xorl.server.sampler.edits import EditRules

SKIP = -1
"""Marks entries of `target_tokens` that are not scored."""
DIVERGED = (
    "the model's logits are NaN, so it cannot be sampled from: it has diverged; load an earlier checkpoint and train "
    "with a lower learning rate"
)
"""The error for results that `has_diverged`."""


@dataclass(frozen=True)
class GenerationRequest:
    """A request to continue `prompt` num_samples times and to return log-probabilities.

    Log-probabilities of the prompt are at temperature 1. Those of sampled tokens are of the logits divided by the
    temperature (undivided at temperature 0), over the whole vocabulary, before `edits`, top_k and top_p.

    Attributes:
        prompt: P token ids, at least one.
        max_tokens: the maximum number of tokens of a sample; 0 only scores the prompt.
        num_samples: the number of samples.
        num_continued: how many of the prompt's last tokens are the beginning of the sample. Its random numbers and its
            stop strings continue from there.
        temperature: divides the logits. Values below 1e-6 count as 0, which takes the most likely token (the lowest id
            of equals).
        top_k: sample among the k most likely tokens; None: among all.
        top_p: and of these, among the fewest whose probabilities add up to top_p.
        edits: changes to the logits before a token is drawn; None changes nothing.
        seed: the seed of the first sample; sample i has seed + i. A sample depends on its seed, the prompt and the
            weights, and not on other samples in the batch, up to the rounding of matrix products.
        stop: token sequences that end a sample; they are included in it. A stop token is a sequence of length 1.
        is_end: called with a sample's tokens after each token; returns whether the sample ends. For stop strings,
            which a tokenizer may split in several ways. Must return the same on every rank.
        adapter: the name of an adapter in the bank; None: the base without an adapter.
        prompt_logprobs: whether to return the log-probabilities of the prompt's tokens.
        top_prompt_logprobs, top_sample_logprobs: how many of the most likely tokens to return at each position.
        num_prompt_scored: return prompt_logprobs and top_prompt_logprobs only for this many of the prompt's last
            tokens; None: for all but the first.
        prompt_draws: how many alternatives to draw, with replacement and at the temperature, for each of the prompt's
            tokens except the first.
        target_tokens: [P - 1, K] int64 or None: tokens to score at the prompt's positions 1, 2, ...; -1 scores none.
        prompt_routes, sample_routes: whether to return the experts of the tokens that predict the prompt, and of those
            that predict a sample.

    Raises ValueError for invalid values.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int = 0
    num_samples: int = 1
    num_continued: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    edits: EditRules | None = None
    stop: tuple[tuple[int, ...], ...] = ()
    is_end: Callable[[Sequence[int]], bool] | None = None
    adapter: str | None = None
    prompt_logprobs: bool = False
    top_prompt_logprobs: int = 0
    top_sample_logprobs: int = 0
    num_prompt_scored: int | None = None
    prompt_draws: int = 0
    target_tokens: NDArray[np.int64] | None = None
    prompt_routes: bool = False
    sample_routes: bool = False

    def __post_init__(self) -> None:
        checks: tuple[tuple[str, bool, object, str], ...] = (
            ("prompt", bool(self.prompt), self.prompt, "at least one token"),
            ("max_tokens", self.max_tokens >= 0, self.max_tokens, "0 or more"),
            ("num_samples", self.num_samples >= 1, self.num_samples, "1 or more"),
            (
                "num_continued",
                0 <= self.num_continued < len(self.prompt),
                self.num_continued,
                "fewer than the prompt's",
            ),
            ("temperature", 0 <= self.temperature < math.inf, self.temperature, "finite and 0 or more"),
            ("top_k", self.top_k is None or self.top_k >= 1, self.top_k, "1 or more, or None for all"),
            ("top_p", 0 < self.top_p <= 1, self.top_p, "above 0 and at most 1"),
            ("stop", all(self.stop), self.stop, "sequences of at least one token"),
            ("top_prompt_logprobs", self.top_prompt_logprobs >= 0, self.top_prompt_logprobs, "0 or more"),
            ("top_sample_logprobs", self.top_sample_logprobs >= 0, self.top_sample_logprobs, "0 or more"),
            ("prompt_draws", self.prompt_draws >= 0, self.prompt_draws, "0 or more"),
            (
                "num_prompt_scored",
                self.num_prompt_scored is None or 1 <= self.num_prompt_scored < len(self.prompt),
                self.num_prompt_scored,
                "at least 1 and fewer than the prompt's tokens",
            ),
        )
        for name, is_valid, value, requirement in checks:
            if not is_valid:
                raise ValueError(f"{name} must be {requirement}, got {value}")
        targets = self.target_tokens
        if targets is not None and (targets.ndim != 2 or len(targets) != len(self.prompt) - 1):
            raise ValueError(
                f"target_tokens must be [{len(self.prompt) - 1}, K], a row for each token of the prompt but the first, "
                f"got {list(targets.shape)}"
            )
        if self.max_tokens == 0 and self.first_scored is None and not self.prompt_routes:
            raise ValueError("max_tokens is 0 and the prompt is not scored: request prompt log-probabilities or tokens")

    @property
    def first_scored(self) -> int | None:
        """The first prompt token whose hidden state is needed to score the next one; None if there is none."""
        if self.target_tokens is not None or self.prompt_draws:
            return 0
        return self.first_reported - 1 if self.prompt_logprobs or self.top_prompt_logprobs else None

    @property
    def first_reported(self) -> int:
        """The first of the prompt's tokens whose log-probability, or most likely tokens, may be returned."""
        return 1 if self.num_prompt_scored is None else len(self.prompt) - self.num_prompt_scored

    def shares(self, num_shares: int) -> list[GenerationRequest]:
        """Split the request into requests for parts of its samples, in order; only the first is of the prompt too."""
        bounds = [self.num_samples * index // num_shares for index in range(num_shares + 1)]
        without_prompt: dict[str, Any] = {
            "prompt_logprobs": False,
            "top_prompt_logprobs": 0,
            "num_prompt_scored": None,
            "prompt_draws": 0,
            "target_tokens": None,
            "prompt_routes": False,
        }
        return [
            replace(self, seed=self.seed + start, num_samples=stop - start, **(without_prompt if start else {}))
            for start, stop in pairwise(bounds)
        ]


class LikelyTokens(NamedTuple):
    """The K most likely tokens at each position, most likely first: token_ids [N, K] int32, logprobs [N, K] fp32.

    Where nothing was scored, ids are 0 and log-probabilities NaN.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True)
class GeneratedSample:
    """One continuation.

    Attributes:
        tokens: N token ids, including the stop sequence.
        logprobs: [N] fp32.
        finish_reason: stop, or length if max_tokens was reached first.
        top_logprobs: if requested.
        versions: the versions of the weights (`Sampler.weights_changed`) that sampled the first and the last token;
            they differ if the weights changed in between.
        routes: [N, ..] int16, of the token before each of the sample's tokens, if requested.
    """

    tokens: tuple[int, ...]
    logprobs: NDArray[np.float32]
    finish_reason: Literal["stop", "length"]
    top_logprobs: LikelyTokens | None
    versions: tuple[int, int]
    routes: NDArray[np.int16] | None


@dataclass(frozen=True)
class GenerationResult:
    """The result of one request.

    Attributes:
        request_id: the id that `submit` returned.
        samples: in the order of their seeds; empty if max_tokens is 0.
        prompt_logprobs: [P] fp32, NaN where nothing was scored: at least at the first token, which nothing predicts.
        top_prompt_logprobs: at P - 1 positions, for the tokens 1, 2, ...
        target_logprobs: [P - 1, K] fp32, NaN where nothing was scored.
        prompt_draws: drawn alternatives at P - 1 positions, with their log-probabilities at temperature 1.
        num_cached_tokens: how many of the prompt's tokens the first sample found in the cache.
        prompt_routes: [P - 1, ..] int16, of the prompt's tokens without its last, if requested.
        problem: why a sample could not follow its grammar to the end; None if all did.
    """

    request_id: int
    samples: tuple[GeneratedSample, ...]
    prompt_logprobs: NDArray[np.float32] | None
    top_prompt_logprobs: LikelyTokens | None
    target_logprobs: NDArray[np.float32] | None
    prompt_draws: LikelyTokens | None
    num_cached_tokens: int
    prompt_routes: NDArray[np.int16] | None
    problem: str | None = None

    @classmethod
    def of_shares(cls, results: Sequence[GenerationResult]) -> GenerationResult:
        """The result of a request from the results of its `shares`, in order."""
        samples = tuple(chain.from_iterable(result.samples for result in results))
        return replace(results[0], samples=samples, problem=next((one.problem for one in results if one.problem), None))

    def has_diverged(self, request: GenerationRequest) -> bool:
        """Whether any token's log-probability is NaN. Impossible tokens have -inf, which is valid."""
        found = [one.logprobs for one in self.samples]
        if self.prompt_logprobs is not None:
            found.append(self.prompt_logprobs[request.first_reported :])
        return any(bool(np.isnan(logprobs).any()) for logprobs in found)
