"""parallelize(): places a model on the mesh, in the one order that works."""

from xorl.core.parallel.activations import Recompute
from xorl.core.parallel.apply import ParallelModel, ParallelPolicy, parallelize, require_possible
from xorl.core.parallel.compile import CompileBackend
from xorl.core.parallel.ddp import replicate
from xorl.core.parallel.exposed import WaitRecorder, record_waits
from xorl.core.parallel.fsdp import copy_shard_, has_copy_engines, local_part, shard, shard_groups, sharding_units

__all__ = [
    "CompileBackend",
    "ParallelModel",
    "ParallelPolicy",
    "Recompute",
    "WaitRecorder",
    "copy_shard_",
    "has_copy_engines",
    "local_part",
    "parallelize",
    "record_waits",
    "replicate",
    "require_possible",
    "shard",
    "shard_groups",
    "sharding_units",
]
