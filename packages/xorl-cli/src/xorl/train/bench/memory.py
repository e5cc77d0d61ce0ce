"""Whether a benchmark's model plainly cannot fit, found before it is filled: a full host kills without a word."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from xorl.config import Config
from xorl.core import runtime
from xorl.core.mesh import Mesh, ParallelDims
from xorl.train.architecture import Architecture
from xorl.train.build import build_engine
from xorl.train.engine import Engine
from xorl.train.step_memory import kept_bytes

# What a container may take, where it is limited.
_LIMIT = Path("/sys/fs/cgroup/memory.max")


def build_engine_that_fits(config: Config, architecture: Architecture, mesh: Mesh, device: torch.device) -> Engine:
    """`build_engine`; collective. Raises ValueError, with the numbers, where the memory plainly does not suffice."""
    if config.train.enable_cpu_offload:
        # The host keeps it then, and one that is virtual may give more, as it is used, than it says it has.
        return build_engine(config, architecture, mesh, device)
    if device.type == "cpu":
        has, sharing, where = _host_bytes(), runtime.world_size() // runtime.num_hosts(), "this machine"
    else:
        has, sharing, where = torch.cuda.get_device_properties(device).total_memory, 1, str(device)
    refusal = memory_refusal(config, architecture, mesh.dims, has=has, sharing=sharing, where=where)
    if refusal is not None:
        raise ValueError(refusal)
    return build_engine(config, architecture, mesh, device)


def memory_refusal(
    config: Config, architecture: Architecture, dims: ParallelDims, *, has: int, sharing: int, where: str
) -> str | None:
    """Why `has` bytes, which so many ranks share, cannot hold what is kept besides activations; None where they can."""
    train, lora = config.train, config.lora
    needed = sharing * kept_bytes(config, architecture, dims)
    if needed <= has:
        return None
    ways = ["a smaller shape"]
    if train.param_dtype == "fp32" and not lora.enable_lora and train.enable_mixed_precision:
        ways.append("--train.param_dtype bf16")
    if not lora.enable_lora:
        ways.append("--lora.enable_lora true")
    if where != "this machine":
        ways.append("more GPUs, with --train.data_parallel_mode fsdp2")
    ranks = f" of {sharing} ranks" * (sharing > 1)
    return (
        f"model: parameters, gradients and optimizer state{ranks} take {needed / 2**30:.1f} GiB (param_dtype "
        f"{train.param_dtype}, optimizer {train.optimizer}), and {where} has {has / 2**30:.1f} GiB, which activations "
        f"have to share; take {', or '.join(ways)}"
    )


def _host_bytes() -> int:
    """The memory of this host, or what a container leaves of it."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _LIMIT.read_text().strip() if _LIMIT.is_file() else "max"
    return min(installed, int(limit)) if limit.isdecimal() else installed
