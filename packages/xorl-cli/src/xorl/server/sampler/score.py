"""Log-probabilities of the prompt's tokens, collected over the passes that compute the prompt.

Shapes: P tokens of the prompt, K scored tokens per position, L positions of one pass, D model width, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xorl.kernels.head import HeadWeight
from xorl.kernels.linear_ce import chunk_rows, wide_logits
from xorl.server.sampler.draw import draw_alternatives
from xorl.server.sampler.request import SKIP, GenerationRequest, LikelyTokens


class PromptScores:
    """The requested scores of a prompt; position i has the log-probability of token i given the tokens before it."""

    def __init__(self, request: GenerationRequest) -> None:
        num_tokens, num_top = len(request.prompt), request.top_prompt_logprobs
        self._request = request
        self._logprobs = np.full(num_tokens, np.nan, np.float32)
        self._top = _nothing(num_tokens - 1, num_top)
        self._draws = _nothing(num_tokens - 1, request.prompt_draws)
        targets = request.target_tokens
        self._target_logprobs = None if targets is None else np.full(targets.shape, np.nan, np.float32)

    def add(self, hidden: Tensor, head: HeadWeight, first: int) -> None:
        """Add the hidden states [L, D] of the tokens from `first` on.

        Logits are computed in fp32, for as many positions at once as in the loss.
        """
        needed = self._request.first_scored
        assert needed is not None, "the request scores its prompt"
        # The prompt's last token does not predict a token of the prompt.
        hidden = hidden[max(needed - first, 0) : len(self._request.prompt) - 1 - first]
        first = max(first, needed)
        size = chunk_rows(len(hidden), torch.float32.itemsize * head.vocab.size)
        for start in range(0, len(hidden), size):
            self._add_rows(wide_logits(hidden[start : start + size], head), first + start)

    def _add_rows(self, logits: Tensor, first: int) -> None:
        request, num_rows = self._request, len(logits)
        logprobs = logits.log_softmax(dim=-1)
        rows = slice(first, first + num_rows)
        # Row i belongs to token i + 1.
        skipped = min(max(request.first_reported - 1 - first, 0), num_rows)
        reported = slice(first + skipped, first + num_rows)
        following = torch.tensor(request.prompt[first + 1 : first + 1 + num_rows], device=logits.device)
        own = _host(logprobs.gather(1, following[:, None]).squeeze(1))
        self._logprobs[reported.start + 1 : reported.stop + 1] = own[skipped:]
        if request.top_prompt_logprobs:
            values, token_ids = logprobs[skipped:].topk(request.top_prompt_logprobs, dim=-1)
            self._top.token_ids[reported], self._top.logprobs[reported] = _host(token_ids), _host(values)
        if request.prompt_draws:
            token_ids = draw_alternatives(logits, request.temperature, request.seed, first, request.prompt_draws)
            self._draws.token_ids[rows] = _host(token_ids)
            self._draws.logprobs[rows] = _host(logprobs.gather(1, token_ids))
        if request.target_tokens is not None and self._target_logprobs is not None:
            targets = request.target_tokens[rows]
            token_ids = torch.from_numpy(np.where(targets == SKIP, 0, targets)).to(logits.device)
            values = _host(logprobs.gather(1, token_ids))
            self._target_logprobs[rows] = np.where(targets == SKIP, np.float32(np.nan), values)

    @property
    def prompt_logprobs(self) -> NDArray[np.float32] | None:
        return self._logprobs if self._request.prompt_logprobs else None

    @property
    def top_prompt_logprobs(self) -> LikelyTokens | None:
        return self._top if self._request.top_prompt_logprobs else None

    @property
    def prompt_draws(self) -> LikelyTokens | None:
        return self._draws if self._request.prompt_draws else None

    @property
    def target_logprobs(self) -> NDArray[np.float32] | None:
        return self._target_logprobs


def _nothing(num_rows: int, num_tokens: int) -> LikelyTokens:
    shape = (num_rows, num_tokens)
    return LikelyTokens(np.zeros(shape, np.int32), np.full(shape, np.nan, np.float32))


def _host(x: Tensor) -> np.ndarray:
    return x.cpu().numpy()
