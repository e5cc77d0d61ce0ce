"""Changes logits before a token is drawn from them: biases, penalties, and tokens that a grammar forbids.

Log-probabilities that samples report are of the unchanged logits.

Shapes: R rows, V vocabulary, W = ceil(V / 32) words of a bitmask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Matcher(Protocol):
    """Follows one sample through a grammar.

    problem: why the grammar cannot be followed any further; None if it can.
    """

    @property
    def problem(self) -> str | None: ...

    def add(self, token: int) -> None:
        """Advance by a token of the sample."""
        ...

    def allowed(self) -> NDArray[np.int32]:
        """A bitmask [W] of the tokens that may follow, lowest bit first; at least one is allowed."""
        ...


@dataclass(frozen=True)
class EditRules:
    """How to change the logits of a request's samples.

    Attributes:
        bias: added to the logits of tokens, by id.
        repetition: divides positive logits, and multiplies negative ones, of tokens in the prompt or the sample.
        frequency: subtracted from the logits of a sample's tokens, once for each time that the sample has them.
        presence: subtracted once from the logits of a sample's tokens.
        grammar: makes a matcher for a sample that has no tokens yet; None allows all tokens. It must give the same on
            every rank.

    A sample's tokens include the end of a prompt that the request continues. Raises ValueError for invalid values.
    """

    bias: Mapping[int, float] = field(default_factory=dict)
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    grammar: Callable[[], Matcher] | None = None

    def __post_init__(self) -> None:
        for name, is_valid, value, requirement in (
            ("logit_bias", all(map(np.isfinite, self.bias.values())), dict(self.bias), "finite numbers"),
            ("repetition_penalty", 0 < self.repetition < np.inf, self.repetition, "finite and above 0"),
            ("frequency_penalty", np.isfinite(self.frequency), self.frequency, "finite"),
            ("presence_penalty", np.isfinite(self.presence), self.presence, "finite"),
        ):
            if not is_valid:
                raise ValueError(f"{name} must be {requirement}, got {value}")


class LogitEdits:
    """The changes to the logits of one sample, which depend on its tokens.

    Args:
        rules: of the request.
        prompt: the tokens before the sample.
        sampled: the tokens that the sample begins with.
    """

    def __init__(self, rules: EditRules, prompt: Sequence[int], sampled: Sequence[int]) -> None:
        self.rules = rules
        self.counts: Counter[int] = Counter()
        self.seen = set(prompt) if rules.repetition != 1 else set()
        self.matcher = None if rules.grammar is None else rules.grammar()
        for token in sampled:
            self.add(token)

    def add(self, token: int) -> None:
        """Note a token of the sample."""
        self.counts[token] += 1
        if self.rules.repetition != 1:
            self.seen.add(token)
        if self.matcher is not None:
            self.matcher.add(token)


def edited_logits(logits: Tensor, edits: Sequence[LogitEdits]) -> Tensor:
    """The logits [R, V] fp32 with the changes of their rows: biases, then repetition, then the other penalties."""
    changed = logits.clone()
    biased = [(row, token, value) for row, one in enumerate(edits) for token, value in one.rules.bias.items()]
    _add(changed, biased)
    repeated = [(row, token, one.rules.repetition) for row, one in enumerate(edits) for token in one.seen]
    if repeated:
        rows, tokens, factors = _columns(repeated, changed)
        found = changed[rows, tokens]
        changed[rows, tokens] = torch.where(found > 0, found / factors, found * factors)
    penalties = [
        (row, token, -(one.rules.presence + count * one.rules.frequency))
        for row, one in enumerate(edits)
        if one.rules.presence or one.rules.frequency
        for token, count in one.counts.items()
    ]
    _add(changed, penalties)
    constrained = [(row, one.matcher) for row, one in enumerate(edits) if one.matcher is not None]
    if constrained:
        masks = np.stack([matcher.allowed() for _, matcher in constrained])
        rows = torch.tensor([row for row, _ in constrained], device=changed.device)
        changed[rows] = changed[rows].masked_fill(~_unpacked(masks, changed), -torch.inf)
    return changed


def _add(logits: Tensor, changes: Sequence[tuple[int, int, float]]) -> None:
    if changes:
        rows, tokens, values = _columns(changes, logits)
        logits.index_put_((rows, tokens), values, accumulate=True)


def _columns(changes: Sequence[tuple[int, int, float]], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Columns of (row, token, value)."""
    rows, tokens, values = zip(*changes, strict=True)
    device = like.device
    return (
        torch.tensor(rows, device=device),
        torch.tensor(tokens, device=device),
        torch.tensor(values, dtype=like.dtype, device=device),
    )


def _unpacked(masks: NDArray[np.int32], logits: Tensor) -> Tensor:
    """Bitmasks [R, W] as booleans [R, V], on the device of the logits."""
    words = torch.from_numpy(masks).to(logits.device)
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)
    return (bits & 1).bool().flatten(1)[:, : logits.shape[1]]
