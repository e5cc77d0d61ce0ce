"""What engines answer a Sample with, whichever they are: tokens, log-probabilities, tables of likely tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from xorl.server.datum import Array
from xorl.server.operations import NO_LOGPROB, TopLogprobs

# (log-probability, token id, text)
Candidate: TypeAlias = tuple[float | None, int, str | None]
# Of an empty cell of a table of likely tokens.
_NO_TOKEN = 0


class Interrupted(Exception):
    """A request that was ended by the server, not by its own limits."""


class OtherWeights(Exception):
    """Tokens of other weights than were asked for."""

    def __init__(self, version: str) -> None:
        super().__init__(version)
        self.version = version


def tokens(ids: Sequence[int]) -> Array:
    """int32 [N]."""
    return Array.of(np.array(ids, dtype=np.int32))


def logprobs(values: Sequence[float | None]) -> Array:
    """float32 [N], NaN for None."""
    return Array.of(np.array([math.nan if value is None else value for value in values], dtype=np.float32))


def top_table(rows: Sequence[Sequence[Candidate] | None], num_top: int) -> TopLogprobs:
    """Tables [N, K] of the most likely tokens, of rows that may hold more."""
    ids = np.full((len(rows), num_top), _NO_TOKEN, dtype=np.int32)
    values = np.full((len(rows), num_top), NO_LOGPROB, dtype=np.float32)
    for place, row in enumerate(rows):
        for index, (value, token, _) in enumerate((row or [])[:num_top]):
            ids[place, index] = token
            values[place, index] = NO_LOGPROB if value is None else value
    return TopLogprobs(Array.of(ids), Array.of(values))
