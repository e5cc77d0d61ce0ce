"""Sends the weights of a placed model to running inference servers."""

from xorl.train.sync.group import let_nccl_reach, match_sglang_nccl
from xorl.train.sync.receiver import ReceiverAddress, Timeouts
from xorl.train.sync.weight_sync import ReceiverOutcome, SyncOptions, SyncOutcome, WeightSender

__all__ = [
    "ReceiverAddress",
    "ReceiverOutcome",
    "SyncOptions",
    "SyncOutcome",
    "Timeouts",
    "WeightSender",
    "let_nccl_reach",
    "match_sglang_nccl",
]
