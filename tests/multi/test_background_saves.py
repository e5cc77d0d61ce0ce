"""Saves in the background over several ranks: shards, adapters, and failures of one rank."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tiny_runs import Tensors
from xorl.ckpt import BackgroundWriter, Checkpointer, CheckpointFailure, read_manifest
from xorl.ckpt.files import HashedFile
from xorl.ckpt.layout import verify

# Rows that two ranks divide unevenly, and fewer rows than ranks.
SHAPES = {"embed": (11, 4), "norm": (3,), "bias": (1, 5)}


def make_state(mesh_shape: tuple[int, ...]) -> dict[str, Tensors]:
    generator = torch.Generator().manual_seed(1)
    module = nn.ParameterDict({name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()})
    names = ("replicate", "shard")[-len(mesh_shape) :]
    fully_shard(module, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))
    return {"model": Tensors(module.named_parameters()), "rest": Tensors(step=torch.tensor(3.0))}


@pytest.mark.parametrize("manager", ["dcp", "torch"])
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_shards_are_saved_as_they_were_while_the_groups_that_train_are_busy(
    manager: str, mesh_shape: tuple[int, ...], tmp_path: Path, run_ranks
) -> None:
    # Catches a save that gathers shards over the groups that train, and one that reads what a step has changed.
    def session() -> bool:
        state, background, may_write = make_state(mesh_shape), BackgroundWriter(), threading.Event()
        first = Checkpointer(tmp_path / "foreground", manager=manager).save(1, state)
        second = Checkpointer(tmp_path / "background", manager=manager).save(
            1, state, background=background, write_extra_files=lambda _: may_write.wait() and {}
        )
        # Ranks run these at different times beside the writing; a shared group would mix them up.
        for _ in range(50):
            dist.all_reduce(state["rest"]["step"])
        for tensor in state["model"].values():
            tensor.data.zero_()
        may_write.set()
        background.finish()
        dist.barrier()
        names = [name for name in verify(second).files if name != ".metadata"]
        return all((first / name).read_bytes() == (second / name).read_bytes() for name in names)

    world_size = 2 if mesh_shape == (2,) else 4
    assert run_ranks(session, world_size) == [True] * world_size
    assert read_manifest(tmp_path / "background" / "global_step_1").world_size == world_size


@contextmanager
def failing(owner: object, attribute: str, code: int) -> Iterator[None]:
    """Within the block, this file operation fails."""
    original = getattr(owner, attribute)

    def fails(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    setattr(owner, attribute, fails)
    try:
        yield
    finally:
        setattr(owner, attribute, original)


# A rank, what fails there, and the last checkpoint after it: a failure after the renaming loses nothing.
FAULTS = {
    "full disk on rank 0": (0, HashedFile, "write", errno.ENOSPC, 1),
    "full disk on rank 1": (1, HashedFile, "write", errno.ENOSPC, 1),
    "broken disk on rank 0": (0, os, "fsync", errno.EIO, 1),
    "broken disk on rank 1": (1, os, "fsync", errno.EIO, 1),
    "no new folder": (0, Path, "mkdir", errno.ENOSPC, 1),
    "publishing": (0, Path, "rename", errno.EIO, 1),
    "moving latest": (0, Path, "replace", errno.EIO, 2),
}


@pytest.mark.parametrize("in_background", [False, True], ids=["foreground", "background"])
def test_faults_are_raised_by_all_ranks_and_earlier_checkpoints_stay(
    in_background: bool, tmp_path: Path, run_ranks
) -> None:
    # Catches a rank that waits for ever for one that could not write, a checkpoint that a failed save damages, and a
    # save after it that cannot succeed.
    def session() -> list[list[object]]:
        told: list[list[object]] = []
        for fault, (rank, owner, attribute, code, latest) in FAULTS.items():
            state, background = make_state((2,)), BackgroundWriter() if in_background else None
            checkpointer = Checkpointer(tmp_path / fault.replace(" ", "_"))

            def save(step: int, checkpointer=checkpointer, state=state, background=background) -> None:
                checkpointer.save(step, state, background=background)
                if background is not None:
                    background.finish()

            save(1)
            fault_here = failing(owner, attribute, code) if dist.get_rank() == rank else nullcontext()
            with fault_here, pytest.raises(CheckpointFailure) as raised:
                save(2)
            dist.barrier()
            found = checkpointer.latest()
            verify(checkpointer.root / "global_step_1")
            dist.barrier()
            save(3)
            names = sorted(path.name for path in checkpointer.root.iterdir())
            assert os.strerror(code) in str(raised.value)
            told.append([str(raised.value), found.name == f"global_step_{latest}", names, checkpointer.latest().name])
            dist.barrier()
        return told

    first, second = run_ranks(session, 2)
    assert first == second
    for (fault, (rank, _, _, _, latest)), (text, is_latest, names, newest) in zip(FAULTS.items(), first, strict=True):
        assert f"rank {rank}: OSError" in text, fault
        assert is_latest, fault
        kept = ["global_step_1", *["global_step_2"] * (latest == 2), "global_step_3", "latest"]
        assert (names, newest) == (kept, "global_step_3"), fault
