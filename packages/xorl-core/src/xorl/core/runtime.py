"""Process set-up: rank, device, process group, random seeds, determinism and garbage collection.

With `join`, the only modules that read torchrun's environment variables.
"""

from __future__ import annotations

import gc
import hashlib
import os
import platform
import random
import shutil
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from xorl.core import graphs
from xorl.core.join import CONNECT_S, Peers, could_not_connect, rendezvous, stay_on_loopback
from xorl.core.launched import STORE_VARIABLE


@dataclass(frozen=True)
class Runtime:
    """The rank of this process, and the `device` that holds its tensors."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that logs and writes shared files."""
        return self.rank == 0


def local_rank() -> int:
    """This process's index on its host, 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def global_rank() -> int:
    """This process's index in the job, 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """The number of processes in the job, 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def num_hosts() -> int:
    """The number of hosts in the job. All hosts run the same number of processes."""
    return world_size() // int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size())))


def default_device_type() -> Literal["cpu", "cuda"]:
    """The device type that `init` chooses under "auto". Does not initialise the device."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def is_launched() -> bool:
    """Whether this process was started by torchrun, by xorl, or by another launcher that sets torchrun's variables."""
    return "RANK" in os.environ and (STORE_VARIABLE in os.environ or "MASTER_ADDR" in os.environ)


def init(
    device_type: Literal["auto", "cpu", "cuda"] = "auto", *, timeout_s: float = 1800.0, peers: Peers | None = None
) -> Runtime:
    """Choose the device and join the default process group (NCCL on GPUs, gloo on CPU); collective.

    Without torchrun the process joins a group of size one, so later code needs no special case. `peers` is the result
    of `join.rendezvous`, which this calls otherwise. Raises RuntimeError if the host has fewer GPUs than processes, and
    JoinError if the ranks cannot reach each other.
    """
    if device_type not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device_type: {device_type!r} is not one of 'auto', 'cpu', 'cuda'")
    if device_type == "auto":
        device_type = default_device_type()
    device = torch.device("cpu")
    if device_type == "cuda":
        use_expandable_segments()
        # NCCL would register the buffers of a captured collective together with ranks that may not capture it now.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        if local_rank() >= torch.cuda.device_count():
            raise RuntimeError(
                f"local rank {local_rank()} has no GPU: only {torch.cuda.device_count()} are visible on this host; "
                "start fewer processes with --nproc-per-node"
            )
        device = torch.device("cuda", local_rank())
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend, timeout = "cuda:nccl,cpu:gloo" if device_type == "cuda" else "gloo", timedelta(seconds=timeout_s)
        if is_launched():
            _join(peers or rendezvous(global_rank(), world_size()), backend, timeout)
        else:
            stay_on_loopback()
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return Runtime(dist.get_rank(), local_rank(), dist.get_world_size(), device)


def _join(peers: Peers, backend: str, timeout: timedelta) -> None:
    """Join the default process group; `timeout` limits its operations, and CONNECT_S how long the ranks connect."""
    rank = global_rank()
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default_pg", peers.store),
            rank=rank,
            world_size=len(peers.locations),
            timeout=timedelta(seconds=CONNECT_S),
        )
    except RuntimeError as error:
        raise could_not_connect(peers, rank, error) from error
    peers.store.set_timeout(timeout)
    set_timeouts(timeout)


def set_timeouts(timeout: timedelta) -> None:
    """Limit the operations of all process groups of this process that exist by now."""
    from xorl.core.torch_private import process_groups, set_group_timeout  # noqa: PLC0415 - imports FSDP2

    for group in process_groups():
        set_group_timeout(group, timeout)


def use_expandable_segments() -> None:
    """Enable expandable segments in the CUDA allocator, unless the environment configures the allocator.

    Micro-batches differ in length, so segments of fixed size would fragment. After the first allocation, the setting
    affects only new segments.
    """
    if not os.environ.get("PYTORCH_ALLOC_CONF") and not os.environ.get("PYTORCH_CUDA_ALLOC_CONF"):
        from xorl.core.torch_private import set_allocator_settings  # noqa: PLC0415 - imports FSDP2

        set_allocator_settings("expandable_segments:True")


def missing_compiler(device_type: str) -> str | None:
    """An error message if the compiler that torch.compile needs on this device type is missing; otherwise None."""
    if device_type == "cuda":
        # Triton compiles its kernel launchers.
        names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
        language = "C"
    else:
        names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
        language = "C++"
    if any(shutil.which(name) for name in names):
        return None
    return f"torch.compile needs a {language} compiler, but {' or '.join(names)} was not found"


def use_compile_cache(torch_default: str) -> Path:
    """Cache compiled code in a persistent folder, one for each version of torch and Python; returns the folder.

    A folder that the user set in TORCHINDUCTOR_CACHE_DIR is kept. Torch itself sets that variable to `torch_default`,
    a temporary folder, on first use; that value is replaced.
    """
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, "", torch_default):
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        versions = f"torch-{torch.__version__}-python-{platform.python_version()}"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(root) / "xorl" / "compiled" / versions)
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"compile_backend: cannot create the compile cache {folder} ({error.strerror}); set "
            "TORCHINDUCTOR_CACHE_DIR to a writable folder"
        ) from error
    return folder


def shutdown() -> None:
    """Destroy the process group after a barrier, because leaving early would abort peers still in a collective."""
    if dist.is_initialized():
        dist.barrier(device_ids=[torch.cuda.current_device()] if torch.cuda.is_initialized() else None)
        graphs.reset_all()
        gc.collect()
        dist.destroy_process_group()


def all_ranks_agree(text: str) -> bool:
    """Whether all ranks pass the same text. The result is the same on every rank. Collective."""
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    extremes = torch.tensor([digest, -digest])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    return bool(extremes[0] == -extremes[1])


def on_any_rank(flag: bool) -> bool:
    """Whether `flag` is set on any rank. The result is the same on every rank. Collective."""
    flags = torch.tensor([flag], dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python, NumPy and torch on every device, with a different seed on each rank."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of the generators that training draws from, as byte tensors."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore the states that `rng_state` returned."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def enable_determinism() -> None:
    """Make all torch operations bitwise reproducible, at a cost in speed.

    Call it before the first CUDA call: cuBLAS and CUDA read these variables at initialisation.
    """
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def refuse_launch_blocking() -> None:
    """Raise ValueError if CUDA_LAUNCH_BLOCKING is set, because it slows training down silently."""
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        raise ValueError(
            "CUDA_LAUNCH_BLOCKING is set, so every GPU kernel waits for the previous one: "
            "unset it, or leave out refuse_launch_blocking()"
        )


class GarbageCollection:
    """Runs Python's garbage collector every `gc_steps` steps, on all ranks at the same step, and never in between.

    Automatic collections stall one rank at a time, and all other ranks wait for it in the next collective.
    """

    def __init__(self, gc_steps: int, empty_cache_steps: int) -> None:
        self._gc_steps = gc_steps
        self._empty_cache_steps = empty_cache_steps

    def __enter__(self) -> GarbageCollection:
        gc.collect()
        if self._gc_steps > 0:
            gc.disable()
        return self

    def step(self, step: int) -> None:
        """Collect garbage and empty the CUDA cache if either is due at `step`."""
        if self._gc_steps > 0 and step % self._gc_steps == 0:
            gc.collect()
        if self._empty_cache_steps > 0 and step % self._empty_cache_steps == 0 and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def __exit__(self, *_: object) -> None:
        gc.enable()
