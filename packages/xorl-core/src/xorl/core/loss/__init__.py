"""Losses: functions of the last hidden states and the head's weight, always a sum over tokens, in a table by name."""

from xorl.core.loss.cross_entropy import cross_entropy, score_tokens, weighted_cross_entropy
from xorl.core.loss.metrics import (
    NUM_TRAINED,
    all_reduce_metrics,
    combine_metrics,
    metrics_between,
    no_metrics,
    read_metrics,
)
from xorl.core.loss.output import IGNORE, HeadLoss, LossFn, LossOutput, TokenValues
from xorl.core.loss.table import LOSSES, check_inputs, loss_named

__all__ = [
    "IGNORE",
    "LOSSES",
    "NUM_TRAINED",
    "HeadLoss",
    "LossFn",
    "LossOutput",
    "TokenValues",
    "all_reduce_metrics",
    "check_inputs",
    "combine_metrics",
    "cross_entropy",
    "loss_named",
    "metrics_between",
    "no_metrics",
    "read_metrics",
    "score_tokens",
    "weighted_cross_entropy",
]
