"""Answers of the OpenAI-compatible calls: choices with their text, log-probabilities and token ids.

Beside OpenAI's fields, `prompt_token_ids` and `token_ids` have the exact tokens, for training on them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from xorl.server.api.responses import JSON
from xorl.server.api.results import likely_tokens
from xorl.server.operations import SampledSequence, SampleResult, TopLogprobs

# What decoding puts in place of bytes that are no character, alike for all of them.
REPLACEMENT = "\ufffd"
# A token, its log-probability and the most likely tokens at its position.
Row = tuple[int, float | None, Sequence[tuple[int, float]] | None]


class Texts:
    """The texts of single tokens, which OpenAI's log-probabilities name instead of ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""
        return self._tokenizer.decode(list(tokens))

    def token(self, token: int) -> str:
        """The text of one token, also of a special one; its name in the vocabulary if it is a part of a character."""
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return text if REPLACEMENT not in text else self._tokenizer.id_to_token(token) or text

    def bytes_of(self, token: int) -> list[int] | None:
        """The UTF-8 bytes of one token's text; None if it is a part of a character."""
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return None if REPLACEMENT in text else list(text.encode())


def rows_of(sequence: SampledSequence) -> list[Row]:
    """The (token, log-probability, most likely tokens) of a sample."""
    return _rows(sequence.tokens.numpy().tolist(), sequence.logprobs.numpy().tolist(), sequence.top_logprobs)


def prompt_rows(prompt: Sequence[int], result: SampleResult) -> list[Row]:
    """The same of a prompt that was scored; nothing predicts its first token."""
    assert result.prompt_logprobs is not None, "echo scores the prompt"
    later = _rows(list(prompt[1:]), result.prompt_logprobs.numpy()[1:].tolist(), result.topk_prompt_logprobs)
    return [(prompt[0], None, None), *later]


def completion_logprobs(rows: Sequence[Row], texts: Texts, offset: int = 0) -> dict[str, JSON]:
    """Log-probabilities as completions have them. offset: the length of the text before."""
    tokens = [texts.token(token) for token, _, _ in rows]
    lengths = np.cumsum([offset, *(len(token) for token in tokens)])
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(logprob) for _, logprob, _ in rows],
        "top_logprobs": [
            None if top is None else {texts.token(token): _finite(logprob) for token, logprob in top}
            for _, _, top in rows
        ],
        "text_offset": lengths[:-1].tolist(),
    }


def chat_logprobs(rows: Sequence[Row], texts: Texts) -> dict[str, JSON]:
    """Log-probabilities as chat completions have them."""
    content: list[JSON] = [
        {
            **_chat_token(token, logprob, texts),
            "top_logprobs": [_chat_token(other, value, texts) for other, value in top or ()],
        }
        for token, logprob, top in rows
    ]
    return {"content": content, "refusal": None}


def usage(num_prompt: int, num_sampled: int, num_cached: int) -> dict[str, JSON]:
    """The numbers of tokens of a call."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def _rows(tokens: Sequence[int], logprobs: Sequence[float], top: TopLogprobs | None) -> list[Row]:
    tops = [None] * len(tokens) if top is None else likely_tokens(top)
    return list(zip(tokens, logprobs, tops, strict=True))


def _chat_token(token: int, logprob: float | None, texts: Texts) -> dict[str, JSON]:
    return {
        "token": texts.token(token),
        "logprob": _finite(logprob),
        "bytes": texts.bytes_of(token),
        "token_id": token,
    }


def _finite(logprob: float | None) -> float | None:
    """A log-probability that every JSON parser can read; OpenAI's server also writes -9999 for impossible tokens."""
    return logprob if logprob is None else max(logprob, -9999.0)
