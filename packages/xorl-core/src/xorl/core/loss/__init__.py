"""Losses by name, as sums over tokens, computed from the last hidden states and the head's weight."""

from xorl.core.loss.cross_entropy import cross_entropy, score_tokens
from xorl.core.loss.metrics import all_reduce_metrics, combine_metrics, read_metrics
from xorl.core.loss.output import IGNORE, LossFn, LossOutput
from xorl.core.loss.table import LOSSES, get_loss

__all__ = [
    "IGNORE",
    "LOSSES",
    "LossFn",
    "LossOutput",
    "all_reduce_metrics",
    "combine_metrics",
    "cross_entropy",
    "get_loss",
    "read_metrics",
    "score_tokens",
]
