"""Weights from a placed model to inference servers, while both go on living."""

from xorl.train.sync.group import match_receivers
from xorl.train.sync.receiver import ReceiverAddress, Timeouts
from xorl.train.sync.weight_sync import ReceiverOutcome, SyncOptions, SyncOutcome, WeightSender

__all__ = [
    "ReceiverAddress",
    "ReceiverOutcome",
    "SyncOptions",
    "SyncOutcome",
    "Timeouts",
    "WeightSender",
    "match_receivers",
]
