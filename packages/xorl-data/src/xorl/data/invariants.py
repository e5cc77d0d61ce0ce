"""What stops a run before its first step: data that would train on nothing, on the wrong tokens, or on less than given.

Counts come from receipt.py; here they are judged.
"""

from __future__ import annotations

import logging

from xorl.data.errors import DataError
from xorl.data.formats import Format, id_problem
from xorl.data.receipt import Counts

logger = logging.getLogger(__name__)

# Samples without any trained token are waste in ones and twos, and a wrong mask or a lost label column beyond that.
_UNTRAINED_LIMIT = 0.01


def check_counts(counts: Counts, name: str, form: Format, option: str, *, explicit_limit: bool) -> None:
    """Raises DataError for counts that no one can want; `explicit_limit` says that max_seq_len was set on purpose."""
    if counts.samples == 0:
        raise DataError(f"{option}: {name} is empty: it has no samples")
    if counts.documents == 0:
        raise DataError(
            f"{option}: nothing is left of {name}: of {counts.samples} samples {counts.dropped} are longer than "
            f"{form.limit_option} = {form.limit} (overflow: {form.overflow}) and {counts.empty} are empty"
        )
    cut = f"{counts.untrained_by_overflow} of them lost theirs when cut at {form.limit_option} = {form.limit} tokens"
    why = f" ({cut})" if counts.untrained_by_overflow else ""
    if counts.trained_tokens == 0:
        raise DataError(
            f"{option}: no token of {name} is trained: none of its {counts.samples} samples has a label other than "
            f"-100 after its first token{why}"
        )
    unexplained = counts.untrained - (counts.untrained_by_overflow if explicit_limit else 0)
    if unexplained > _UNTRAINED_LIMIT * counts.samples:
        raise DataError(
            f"{option}: {counts.untrained} of the {counts.samples} samples of {name} have no trained token{why}, "
            f"more than {_UNTRAINED_LIMIT:.0%}. Remove them, or look at how labels are made; where cutting is what you "
            f"want, set {option}.max_seq_len"
        )
    if counts.untrained:
        logger.warning("prepare dataset=%s untrained_samples=%d%s", name, counts.untrained, why)


def check_largest_id(largest: tuple[int, int], name: str, vocab_size: int | None) -> None:
    """Raises DataError where (largest id, its row) is outside the vocabulary."""
    if vocab_size is not None and largest[0] >= vocab_size:
        raise DataError(f"{name}, row {largest[1]} (the first is 0): {id_problem(largest[0], 'a sample', vocab_size)}")
