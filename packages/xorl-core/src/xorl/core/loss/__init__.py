"""Losses: functions of the last hidden states and the head weight, always a sum over tokens; and their table."""

from xorl.core.loss.cross_entropy import cross_entropy, score_tokens
from xorl.core.loss.output import IGNORE, LossFn, LossOutput

LOSSES: dict[str, LossFn] = {"cross_entropy": cross_entropy}

__all__ = ["IGNORE", "LOSSES", "LossFn", "LossOutput", "cross_entropy", "score_tokens"]
