"""Rejects models that do not fit before allocating them, because an out-of-memory kill leaves no message."""

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

# The memory limit of a container (cgroup v2); "max" if it has none.
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_HOST = "this machine"


def build_engine_if_it_fits(config: Config, architecture: Architecture, mesh: Mesh, device: torch.device) -> Engine:
    """`build_engine`, collective. Raises ValueError, with the sizes, if the device or host memory is too small."""
    if config.train.enable_cpu_offload:
        # The state is kept on the host, and a virtual machine may provide more memory on demand than it reports.
        return build_engine(config, architecture, mesh, device)
    if device.type == "cpu":
        available, num_ranks, owner = _host_bytes(), runtime.world_size() // runtime.num_hosts(), _HOST
    else:
        available, num_ranks, owner = torch.cuda.get_device_properties(device).total_memory, 1, str(device)
    refusal = memory_refusal(
        config, architecture, mesh.dims, available_bytes=available, num_ranks=num_ranks, owner=owner
    )
    if refusal is not None:
        raise ValueError(refusal)
    return build_engine(config, architecture, mesh, device)


def memory_refusal(
    config: Config, architecture: Architecture, dims: ParallelDims, *, available_bytes: int, num_ranks: int, owner: str
) -> str | None:
    """An error message if parameters, gradients and optimizer state exceed `available_bytes`; None if they fit.

    num_ranks: the ranks that share this memory. owner: the host or device it belongs to, for the message.
    """
    train, lora = config.train, config.lora
    needed = num_ranks * kept_bytes(config, architecture, dims)
    if needed <= available_bytes:
        return None
    remedies = ["a smaller shape"]
    if train.param_dtype == "fp32" and not lora.enable_lora and train.enable_mixed_precision:
        remedies.append("--train.param_dtype bf16")
    if not lora.enable_lora:
        remedies.append("--lora.enable_lora true")
    if owner != _HOST:
        remedies.append("more GPUs, with --train.data_parallel_mode fsdp2")
    ranks = f" of {num_ranks} ranks" * (num_ranks > 1)
    return (
        f"model: parameters, gradients and optimizer state{ranks} take {needed / 2**30:.1f} GiB (param_dtype "
        f"{train.param_dtype}, optimizer {train.optimizer}), and {owner} has {available_bytes / 2**30:.1f} GiB, which "
        f"must also hold activations; use {', or '.join(remedies)}"
    )


def _host_bytes() -> int:
    """The memory of this host, or the container's limit if that is lower."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
    return min(installed, int(limit)) if limit.isdecimal() else installed
