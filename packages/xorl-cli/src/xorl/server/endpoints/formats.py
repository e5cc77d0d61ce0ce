"""Shared by the engines: sampling parameters, and the tokens, log-probabilities and errors of their answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from xorl.server.datum import Array
from xorl.server.operations import NO_LOGPROB, Sample, ToolCalls, TopLogprobs

# (log-probability, token id, text)
Candidate: TypeAlias = tuple[float | None, int, str | None]
# The token id in empty cells of a table of likely tokens.
_NO_TOKEN = 0


class RequestInterrupted(Exception):
    """The server ended the request before it reached its limits, for example to update its weights."""


class UnexpectedWeights(Exception):
    """The answer was computed with another version of the weights than expected."""

    def __init__(self, version: str) -> None:
        super().__init__(version)
        self.version = version


def sampling_params(operation: Sample) -> dict[str, object]:
    """The sampling parameters that have the same names and meanings in both engines."""
    params: dict[str, object] = {
        "temperature": operation.temperature,
        "top_p": operation.top_p,
        "top_k": -1 if operation.top_k is None else operation.top_k,
        "ignore_eos": operation.ignore_end,
    }
    if operation.logit_bias:
        params["logit_bias"] = {str(token): value for token, value in operation.logit_bias}
    neutral = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    params |= {name: getattr(operation, name) for name, value in neutral.items() if getattr(operation, name) != value}
    if operation.stop_strings:
        params["stop"] = list(operation.stop_strings)
    if operation.stop_ids:
        params["stop_token_ids"] = list(operation.stop_ids)
    return params


def structural_tag(calls: ToolCalls) -> dict[str, object]:
    """The form of tool calls as both engines read it (the structural tags of XGrammar)."""
    tags = [
        {
            "type": "tag",
            "begin": call.begin,
            "content": {"type": "json_schema", "json_schema": msgspec.json.decode(call.schema)},
            "end": call.end,
        }
        for call in calls.calls
    ]
    single = calls.most == 1
    listed: dict[str, object] = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": calls.separator,
        "at_least_one": True,
        "stop_after_first": single,
    }
    whole: dict[str, object] = listed
    if calls.opening or calls.closing:
        fixed = [{"type": "const_string", "value": text} if text else None for text in (calls.opening, calls.closing)]
        whole = {"type": "sequence", "elements": [each for each in (fixed[0], listed, fixed[1]) if each is not None]}
    if calls.trigger is not None:
        outer = (
            tags
            if whole is listed
            else [{"type": "tag", "begin": calls.opening, "content": listed, "end": calls.closing}]
        )
        whole = {
            "type": "triggered_tags",
            "triggers": [calls.trigger],
            "tags": outer,
            "at_least_one": False,
            "stop_after_first": single or whole is not listed,
        }
    if calls.instead is not None:
        answer = {"type": "json_schema", "json_schema": msgspec.json.decode(calls.instead)}
        whole = {"type": "or", "elements": [answer, whole]}
    return {"type": "structural_tag", "format": whole}


def tokens(ids: Sequence[int]) -> Array:
    """Token ids as int32 [N]."""
    return Array.of(np.array(ids, dtype=np.int32))


def logprobs(values: Sequence[float | None]) -> Array:
    """Log-probabilities as float32 [N], with NaN for None."""
    return Array.of(np.array([math.nan if value is None else value for value in values], dtype=np.float32))


def top_table(rows: Sequence[Sequence[Candidate] | None], num_top: int) -> TopLogprobs:
    """Tables [N, K] of the most likely tokens; rows may have more or fewer than K candidates."""
    ids = np.full((len(rows), num_top), _NO_TOKEN, dtype=np.int32)
    values = np.full((len(rows), num_top), NO_LOGPROB, dtype=np.float32)
    for position, row in enumerate(rows):
        for index, (value, token, _) in enumerate((row or [])[:num_top]):
            ids[position, index] = token
            values[position, index] = NO_LOGPROB if value is None else value
    return TopLogprobs(Array.of(ids), Array.of(values))
