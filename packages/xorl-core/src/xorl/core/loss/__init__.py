"""Losses by name, as sums over tokens, computed from the last hidden states and the head's weight."""

from xorl.core.loss.cross_entropy import cross_entropy, score_tokens, weighted_cross_entropy
from xorl.core.loss.metrics import all_reduce_metrics, combine_metrics, read_metrics
from xorl.core.loss.output import IGNORE, LossFn, LossOutput
from xorl.core.loss.preference import PREFERENCE_LOSSES, PreferenceLoss, PreferenceOptions, score_answers
from xorl.core.loss.table import LOSSES, get_loss

__all__ = [
    "IGNORE",
    "LOSSES",
    "PREFERENCE_LOSSES",
    "LossFn",
    "LossOutput",
    "PreferenceLoss",
    "PreferenceOptions",
    "all_reduce_metrics",
    "combine_metrics",
    "cross_entropy",
    "get_loss",
    "read_metrics",
    "score_answers",
    "score_tokens",
    "weighted_cross_entropy",
]
