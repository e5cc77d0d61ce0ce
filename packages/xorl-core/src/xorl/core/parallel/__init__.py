"""Data parallelism, recomputation, compilation and offloading of a model."""

from xorl.core.parallel.apply import ParallelModel, ParallelPolicy, parallelize
from xorl.core.shards import copy_shard_

__all__ = [
    "ParallelModel",
    "ParallelPolicy",
    "copy_shard_",
    "parallelize",
]
