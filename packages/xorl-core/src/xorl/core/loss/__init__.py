"""Losses: functions of the last hidden states and the head weight, always a sum over tokens; and their table."""

from xorl.core.loss.cross_entropy import cross_entropy, score_tokens
from xorl.core.loss.output import IGNORE, HeadLoss, LossFn, LossOutput

LOSSES: dict[str, HeadLoss] = {"cross_entropy": cross_entropy}

__all__ = ["IGNORE", "LOSSES", "HeadLoss", "LossFn", "LossOutput", "cross_entropy", "score_tokens"]
