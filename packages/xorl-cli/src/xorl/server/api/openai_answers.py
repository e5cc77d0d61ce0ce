"""Answers of the OpenAI-compatible calls: choices with their text, log-probabilities and token ids.

Beside OpenAI's fields, `prompt_token_ids` and `token_ids` have the exact tokens, for training on them.
"""

from __future__ import annotations

from collections.abc import Sequence

from xorl.server.api.responses import JSON
from xorl.server.api.results import likely_tokens
from xorl.server.api.token_texts import Offsets, TokenTexts, token_id_text
from xorl.server.operations import SampledSequence, SampleResult, TopLogprobs

# Precedes the bytes of a token that is only part of a character, in completions.
_BYTES = "bytes:"
# A token, its log-probability and the most likely tokens at its position.
Row = tuple[int, float | None, Sequence[tuple[int, float]] | None]


def rows_of(sequence: SampledSequence) -> list[Row]:
    """The (token, log-probability, most likely tokens) of a sample."""
    return _rows(sequence.tokens.numpy().tolist(), sequence.logprobs.numpy().tolist(), sequence.top_logprobs)


def prompt_rows(prompt: Sequence[int], result: SampleResult, num_top: int) -> list[Row]:
    """Rows of a scored prompt, with the `num_top` most likely tokens; the first token has no log-probability."""
    assert result.prompt_logprobs is not None, "the call scores the prompt"
    later = _rows(list(prompt[1:]), result.prompt_logprobs.numpy()[1:].tolist(), result.topk_prompt_logprobs)
    return [
        (prompt[0], None, None),
        *((token, logprob, top[:num_top] if top is not None and num_top else None) for token, logprob, top in later),
    ]


def completion_logprobs(rows: Sequence[Row], texts: TokenTexts, offsets: Offsets) -> dict[str, JSON]:
    """Log-probabilities in the form of completions. offsets: positioned at the first of these tokens."""
    return {
        "tokens": [texts.token(token, _BYTES) for token, _, _ in rows],
        "token_logprobs": [_finite(logprob) for _, logprob, _ in rows],
        "top_logprobs": [_top_by_text(row, texts) for row in rows],
        "text_offset": offsets.add([token for token, _, _ in rows]),
    }


def chat_logprobs(rows: Sequence[Row], texts: TokenTexts) -> dict[str, JSON]:
    """Log-probabilities as chat completions have them."""
    content: list[JSON] = [
        {
            **_chat_token(token, logprob, texts),
            "top_logprobs": [_chat_token(other, value, texts) for other, value in top or ()],
        }
        for token, logprob, top in rows
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(rows: Sequence[Row], texts: TokenTexts) -> list[JSON]:
    """Log-probabilities of a prompt in vLLM's form: by token id, the prompt's own token first."""
    return [None if logprob is None else _by_id(token, logprob, top or (), texts) for token, logprob, top in rows]


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


def _top_by_text(row: Row, texts: TokenTexts) -> dict[str, JSON] | None:
    """The most likely tokens and the token itself. Of tokens with the same text, the less likely are named by id."""
    token, logprob, top = row
    if top is None or logprob is None:
        return None
    found: dict[str, JSON] = {}
    for other, value in _with_own(token, logprob, top):
        name = texts.token(other, _BYTES)
        found[name if name not in found else token_id_text(other)] = _finite(value)
    return found


def _with_own(token: int, logprob: float, top: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return [*top] if any(other == token for other, _ in top) else [*top, (token, logprob)]


def _by_id(token: int, logprob: float, top: Sequence[tuple[int, float]], texts: TokenTexts) -> dict[str, JSON]:
    ranks: dict[int, int | None] = {token: None} | {other: rank for rank, (other, _) in enumerate(top, 1)}
    values = {token: logprob} | dict(top)
    return {
        str(other): {"logprob": _finite(values[other]), "rank": rank, "decoded_token": texts.token(other)}
        for other, rank in ranks.items()
    }


def _chat_token(token: int, logprob: float | None, texts: TokenTexts) -> dict[str, JSON]:
    return {
        "token": texts.token(token),
        "logprob": _finite(logprob),
        "bytes": list(texts.bytes_of(token)),
        "token_id": token,
    }


def _finite(logprob: float | None) -> float | None:
    """A log-probability that every JSON parser can read; OpenAI's server also writes -9999 for impossible tokens."""
    return logprob if logprob is None else max(logprob, -9999.0)
