"""Draws tokens from logits, with their log-probabilities. Every row has its own rules and is independent of the others.

Shapes: R rows, V vocabulary, K tokens of the widest top list.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Lower temperatures count as 0: dividing fp32 logits by them gives infinities, and NaN as their differences.
LEAST_TEMPERATURE = 1e-6


class DrawRule(NamedTuple):
    """How to draw one row. `uniform` is the random number in [0, 1) to use; others as in `SampleRequest`."""

    temperature: float
    top_k: int | None
    top_p: float
    uniform: float


class Drawn(NamedTuple):
    """tokens [R] int64; logprobs [R]; top tokens and logprobs [R, K], most likely first. On the host."""

    tokens: Tensor
    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor


def uniform_number(seed: int, place: int) -> float:
    """The random number in [0, 1) for the token at `place` of the sample with `seed`: a function of these two alone."""
    digest = hashlib.blake2b(struct.pack("<qq", _wrapped(seed), place), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def draw(logits: Tensor, rules: Sequence[DrawRule], num_top: int) -> Drawn:
    """A token for each row of logits [R, V] fp32, by inverting its distribution function at the row's `uniform`.

    Tokens are ordered by id, or by probability if some are cut off (ties by id). Sums are fp64, so that they do not
    depend on the number of rows.
    """
    device = logits.device
    is_greedy = [rule.temperature < LEAST_TEMPERATURE for rule in rules]
    divisors = [1.0 if greedy else rule.temperature for rule, greedy in zip(rules, is_greedy, strict=True)]
    temperatures = torch.tensor(divisors, device=device)
    logprobs = (logits / temperatures[:, None]).log_softmax(dim=-1)
    tokens = logits.argmax(dim=-1)
    drawn = [index for index, greedy in enumerate(is_greedy) if not greedy]
    cut = [index for index in drawn if rules[index].top_k is not None or rules[index].top_p < 1]
    whole = [index for index in drawn if index not in set(cut)]
    if whole:
        tokens[whole] = _invert(logprobs[whole].double().exp_(), [rules[index].uniform for index in whole])
    if cut:
        tokens[cut] = _draw_among_likely(logprobs[cut], [rules[index] for index in cut])
    top_logprobs, top_tokens = logprobs.topk(num_top, dim=-1)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    return Drawn(tokens.cpu(), chosen.cpu(), top_tokens.cpu(), top_logprobs.cpu())


def _draw_among_likely(logprobs: Tensor, rules: Sequence[DrawRule]) -> Tensor:
    """Tokens [R] from the k most likely ones, limited to the fewest of these whose probability adds up to top_p."""
    device, num_tokens = logprobs.device, logprobs.shape[1]
    ordered, token_ids = logprobs.sort(dim=-1, descending=True, stable=True)
    weights = ordered.double().exp_()
    ks = torch.tensor([min(rule.top_k or num_tokens, num_tokens) for rule in rules], device=device)
    weights.masked_fill_(torch.arange(num_tokens, device=device) >= ks[:, None], 0.0)
    shares = torch.tensor([rule.top_p for rule in rules], dtype=torch.float64, device=device)
    before = weights.cumsum(dim=-1) - weights
    limit = shares * weights.sum(dim=-1)
    # The most likely token always stays, whatever top_p is.
    weights[:, 1:].masked_fill_(before[:, 1:] >= limit[:, None], 0.0)
    places = _invert(weights, [rule.uniform for rule in rules])
    return token_ids.gather(1, places[:, None]).squeeze(1)


def _invert(weights: Tensor, uniforms: Sequence[float]) -> Tensor:
    """For each row of weights [R, V] fp64, the first index whose running sum exceeds `uniform` times the total."""
    sums = weights.cumsum(dim=-1)
    wanted = torch.tensor(uniforms, dtype=torch.float64, device=weights.device)[:, None] * sums[:, -1:]
    found = torch.searchsorted(sums, wanted, right=True)
    # Rounding may raise the number to the total: then the last token with any weight is taken.
    last = weights.shape[1] - 1 - (weights > 0).flip(1).int().argmax(dim=1, keepdim=True)
    return torch.minimum(found, last).squeeze(1)


def _wrapped(seed: int) -> int:
    """Any integer as a signed 64-bit one."""
    return (seed + 2**63) % 2**64 - 2**63
