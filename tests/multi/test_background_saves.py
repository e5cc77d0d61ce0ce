"""Saves in the background over several ranks: shards, adapters, and failures of one rank."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from xorl.ckpt import BackgroundWriter, Checkpointer, CheckpointFailure, read_manifest
from xorl.ckpt.files import HashedFile
from xorl.ckpt.layout import verify

pytestmark = pytest.mark.multi
# Rows that two ranks divide unevenly, and fewer rows than ranks.
SHAPES = {"embed": (11, 4), "norm": (3,), "bias": (1, 5)}


class Tensors(dict):
    """Named tensors as a part of a training state."""

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self)

    def load_state_dict(self, _: dict[str, Tensor]) -> None:
        pass


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


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_of_one_rank_is_raised_by_all(failing: int, tmp_path: Path, run_ranks) -> None:
    # Catches a rank that waits for ever for one that could not write, and a save after it that cannot succeed.
    def session() -> list[str]:
        state, background, checkpointer = make_state((2,)), BackgroundWriter(), Checkpointer(tmp_path / "all")
        checkpointer.save(1, state, background=background)
        background.finish()

        def fails(self: object, data: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        write = HashedFile.write
        if dist.get_rank() == failing:
            HashedFile.write = fails
        checkpointer.save(2, state, background=background)
        with pytest.raises(CheckpointFailure) as raised:
            background.finish()
        HashedFile.write = write
        dist.barrier()
        names = sorted(path.name for path in checkpointer.root.iterdir())
        dist.barrier()
        checkpointer.save(2, state, background=background)
        background.finish()
        return [str(raised.value), ",".join(names), checkpointer.latest().name]

    first, second = run_ranks(session, 2)
    assert first == second
    assert f"rank {failing}: OSError: [Errno 5]" in first[0]
    assert first[1:] == ["global_step_1,latest", "global_step_2"]
