"""Draws tokens from logits and returns their log-probabilities. Each row has its own rule; rows are independent.

Shapes: R rows, V vocabulary, K tokens of the longest top list.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xorl.server.sampler.edits import LogitEdits, edited_logits

# Lower temperatures count as 0: dividing fp32 logits by them gives infinities, whose differences are NaN.
MIN_TEMPERATURE = 1e-6
# With a large vocabulary, each row of fp64 weights takes a megabyte.
_ROWS_AT_ONCE = 64


class DrawRule(NamedTuple):
    """How to draw from one row. `uniform` is its random number in [0, 1); for the rest see `GenerationRequest`.

    edits: changes to the row before drawing; None draws from the row as it is.
    """

    temperature: float
    top_k: int | None
    top_p: float
    uniform: float
    edits: LogitEdits | None = None


class Drawn(NamedTuple):
    """tokens [R] int64; logprobs [R]; top tokens and logprobs [R, K], most likely first. All on the host."""

    tokens: Tensor
    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor


def uniform_number(seed: int, position: int) -> float:
    """The random number in [0, 1) for the token at `position` of a sample with `seed`; depends only on these two."""
    digest = hashlib.blake2b(struct.pack("<qq", _as_int64(seed), position), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def draw(logits: Tensor, rules: Sequence[DrawRule], num_top: int) -> Drawn:
    """Draw a token for each row of logits [R, V] fp32, by inverting its distribution function at the row's `uniform`.

    The distribution function orders tokens by id, or by probability if top_k or top_p cut some off (ties by id). Sums
    are fp64, so that results do not depend on the number of rows. Log-probabilities are of the logits without edits.
    """
    logprobs = _logprobs(logits, rules)
    edited = [index for index, rule in enumerate(rules) if rule.edits is not None]
    if edited:
        tokens = _draw_edited(logits, logprobs, rules, edited)
    else:
        tokens = _draw(logits, logprobs, rules)
    top_logprobs, top_tokens = logprobs.topk(num_top, dim=-1)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    return Drawn(tokens.cpu(), chosen.cpu(), top_tokens.cpu(), top_logprobs.cpu())


def _logprobs(logits: Tensor, rules: Sequence[DrawRule]) -> Tensor:
    """Log-probabilities [R, V] at each row's temperature; at temperature 1 if it draws the most likely token."""
    divisors = [1.0 if rule.temperature < MIN_TEMPERATURE else rule.temperature for rule in rules]
    return (logits / torch.tensor(divisors, device=logits.device)[:, None]).log_softmax(dim=-1)


def _draw_edited(logits: Tensor, logprobs: Tensor, rules: Sequence[DrawRule], edited: Sequence[int]) -> Tensor:
    """Draw tokens [R], from the rows `edited` after their edits."""
    tokens = torch.empty(len(rules), dtype=torch.int64, device=logits.device)
    changed_rules = [rules[index] for index in edited]
    changed = edited_logits(logits[list(edited)], [rule.edits for rule in changed_rules if rule.edits is not None])
    tokens[list(edited)] = _draw(changed, _logprobs(changed, changed_rules), changed_rules)
    others = [index for index, rule in enumerate(rules) if rule.edits is None]
    if others:
        tokens[others] = _draw(logits[others], logprobs[others], [rules[index] for index in others])
    return tokens


def _draw(logits: Tensor, logprobs: Tensor, rules: Sequence[DrawRule]) -> Tensor:
    """Draw tokens [R] from log-probabilities [R, V], or the most likely ones by their logits."""
    device = logits.device
    tokens = logits.argmax(dim=-1)
    drawn = [index for index, rule in enumerate(rules) if rule.temperature >= MIN_TEMPERATURE]
    cut = [index for index in drawn if rules[index].top_k is not None or rules[index].top_p < 1]
    whole = [index for index in drawn if index not in set(cut)]
    if whole:
        uniforms = _column([rules[index].uniform for index in whole], device)
        tokens[whole] = _invert(logprobs[whole].double().exp_(), uniforms).squeeze(1)
    if cut:
        tokens[cut] = _draw_among_likely(logprobs[cut], [rules[index] for index in cut])
    return tokens


def _draw_among_likely(logprobs: Tensor, rules: Sequence[DrawRule]) -> Tensor:
    """Draw tokens [R] among the top_k most likely, and of these the fewest whose probabilities add up to top_p."""
    device, num_tokens = logprobs.device, logprobs.shape[1]
    ordered, token_ids = logprobs.sort(dim=-1, descending=True, stable=True)
    weights = ordered.double().exp_()
    ks = torch.tensor([min(rule.top_k or num_tokens, num_tokens) for rule in rules], device=device)
    weights.masked_fill_(torch.arange(num_tokens, device=device) >= ks[:, None], 0.0)
    shares = torch.tensor([rule.top_p for rule in rules], dtype=torch.float64, device=device)
    before = weights.cumsum(dim=-1) - weights
    limit = shares * weights.sum(dim=-1)
    # The most likely token always stays, even if top_p is tiny.
    weights[:, 1:].masked_fill_(before[:, 1:] >= limit[:, None], 0.0)
    ranks = _invert(weights, _column([rule.uniform for rule in rules], device))
    return token_ids.gather(1, ranks).squeeze(1)


def draw_alternatives(logits: Tensor, temperature: float, seed: int, first: int, num_draws: int) -> Tensor:
    """Draw tokens [R, num_draws] int64, with replacement, from each row of logits [R, V] fp32.

    first: the position of the first row. The random numbers depend on the seed and the position, and differ from those
    of `uniform_number`.
    """
    if temperature < MIN_TEMPERATURE:
        return logits.argmax(dim=-1, keepdim=True).expand(-1, num_draws)
    drawn: list[Tensor] = []
    for index, rows in enumerate(logits.split(_ROWS_AT_ONCE)):
        weights = (rows / temperature).log_softmax(dim=-1).double().exp_()
        start = first + index * _ROWS_AT_ONCE
        numbers = np.stack([_uniform_numbers(seed, start + row, num_draws) for row in range(len(rows))])
        drawn.append(_invert(weights, torch.from_numpy(numbers).to(logits.device)))
    return torch.cat(drawn)


def _uniform_numbers(seed: int, position: int, count: int) -> NDArray[np.float64]:
    digest = hashlib.shake_128(struct.pack("<qq", _as_int64(seed), position)).digest(8 * count)
    return (np.frombuffer(digest, "<u8") >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _column(uniforms: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(uniforms, dtype=torch.float64, device=device)[:, None]


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """For each row of weights [R, V] fp64, the first index whose running sum exceeds each of its uniforms [R, N].

    uniforms: as shares of the row's sum.
    """
    sums = weights.cumsum(dim=-1)
    found = torch.searchsorted(sums, uniforms * sums[:, -1:], right=True)
    # If rounding raises the product to the total, take the last token with nonzero weight.
    last = weights.shape[1] - 1 - (weights > 0).flip(1).int().argmax(dim=1, keepdim=True)
    return torch.minimum(found, last)


def _as_int64(seed: int) -> int:
    """An integer of any size, reduced modulo 2^64 to a signed 64-bit one."""
    return (seed + 2**63) % 2**64 - 2**63
