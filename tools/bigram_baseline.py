"""The loss of a bigram model on a tokenized dataset: `uv run tools/bigram_baseline.py TRAIN.jsonl HELDOUT.jsonl`.

A trained model that has learned more than bigram statistics has a lower loss. The bigram model is an interpolated
Kneser-Ney model (Chen and Goodman 1999, "An empirical study of smoothing techniques for language modeling", section 3).
Like the trainer, it counts all tokens but the first of each row.
"""

import argparse
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

Rows = Sequence[Sequence[int]]
# Factors by which the discounts estimated from the training counts are scaled.
DISCOUNT_SCALES = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)


class KneserNeyBigram:
    """P(token | previous): discounted pair counts, interpolated with the number of distinct tokens before a token."""

    def __init__(self, rows: Rows, vocab_size: int, discount_scale: float = 1.0) -> None:
        self._vocab_size = vocab_size
        self._pairs = Counter(pair for row in rows for pair in pairwise(row))
        self._distinct_before = Counter(token for _, token in self._pairs)
        self._pair_discounts = _discounts(self._pairs.values(), discount_scale)
        self._lower_discounts = _discounts(self._distinct_before.values(), discount_scale)
        self._after: Counter[int] = Counter()
        self._withheld: defaultdict[int, float] = defaultdict(float)  # by discounting, per previous token
        for (previous, _), count in self._pairs.items():
            self._after[previous] += count
            self._withheld[previous] += _discount(count, self._pair_discounts)
        self._lower_withheld = sum(_discount(count, self._lower_discounts) for count in self._distinct_before.values())

    def probability(self, previous: int, token: int) -> float:
        """The probability of `token` after `previous`; sums to 1 over the vocabulary."""
        distinct = self._distinct_before[token]
        kept = distinct - _discount(distinct, self._lower_discounts)
        lower = (kept + self._lower_withheld / self._vocab_size) / len(self._pairs)
        if not self._after[previous]:
            return lower
        count = self._pairs[previous, token]
        kept = count - _discount(count, self._pair_discounts)
        return (kept + self._withheld[previous] * lower) / self._after[previous]

    def loss(self, rows: Rows) -> float:
        """Mean loss in nats over all tokens but the first of each row."""
        losses = [-math.log(self.probability(*pair)) for row in rows for pair in pairwise(row)]
        return sum(losses) / len(losses)


def _discounts(counts: Iterable[int], scale: float) -> list[float]:
    """The discounts of counts of 1, of 2 and above, estimated by Chen and Goodman, equation (26)."""
    of_counts = Counter(counts)
    n1, n2, n3, n4 = (max(of_counts[count], 1) for count in (1, 2, 3, 4))
    base = n1 / (n1 + 2 * n2)
    estimates = (1 - 2 * base * n2 / n1, 2 - 3 * base * n3 / n2, 3 - 4 * base * n4 / n3)
    return [min(max(scale * estimate, 0.0), count) for count, estimate in enumerate(estimates, start=1)]


def _discount(count: int, discounts: Sequence[float]) -> float:
    return discounts[min(count, len(discounts)) - 1] if count else 0.0


def read_rows(path: Path) -> list[list[int]]:
    """The token ids of a tokenized jsonl file."""
    return [json.loads(line)["input_ids"] for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Parses the command line and prints the held-out loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("train", type=Path)
    parser.add_argument("heldout", type=Path)
    options = parser.parse_args()

    train, heldout = read_rows(options.train), read_rows(options.heldout)
    vocab_size = 1 + max(token for row in (*train, *heldout) for token in row)
    losses = {scale: KneserNeyBigram(train, vocab_size, scale).loss(heldout) for scale in DISCOUNT_SCALES}
    best = min(losses, key=lambda scale: losses[scale])
    num_tokens = sum(len(row) - 1 for row in heldout)
    print(f"bigram loss per token (nats)  {losses[1.0]:.4f}  on {num_tokens:,} held-out tokens")
    # Selecting the scale on the held-out rows favours the baseline, which is acceptable.
    print(f"with the best discounts for the held-out tokens  {losses[best]:.4f}  (scaled by {best})")


if __name__ == "__main__":
    main()
