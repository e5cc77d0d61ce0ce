"""Checkpoints, weights and exports across ranks: resharding, agreement on failure, torn saves."""

import os
import pickle
import resource
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tiny_runs import Tensors
from xorl.ckpt import Checkpointer, CheckpointError, CheckpointFailure, SafetensorsSource, export_hf, load_weights
from xorl.ckpt.layout import verify
from xorl.core.models.recipes import Part, Rows

MANAGERS = pytest.mark.parametrize("manager", ["dcp", "torch"])
# Rows that 2 and 4 ranks divide unevenly, and fewer rows than ranks.
SHAPES = {"embed": (11, 4), "qkv": (8, 4), "norm": (3,), "left": (3, 4), "right": (2, 4)}
RECIPES = {
    "embed": Rows(("wte",), (11,), (4,)),
    "qkv": Rows(("q", "k", "v"), (4, 2, 2), (4,)),
    "norm": Rows(("n",), (3,), ()),
    "left": Part("s", 0, (3, 4), transposed=True, shared=True),
    "right": Part("s", 3, (2, 4), transposed=True, shared=True),
}


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def make_state(seed: int, mesh_shape: tuple[int, ...] | None = None) -> dict[str, Tensors]:
    """Model and moments: whole, or sharded over a mesh of this shape (two axes: replicate, shard)."""
    module = nn.ParameterDict({name: nn.Parameter(tensor) for name, tensor in values(seed).items()})
    if mesh_shape is not None:
        names = ("replicate", "shard")[-len(mesh_shape) :]
        fully_shard(module, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))
    params = dict(module.named_parameters())
    moments = {f"{name}.exp_avg": (param * 2).detach() for name, param in params.items()}
    return {"model": Tensors(params), "optimizer": Tensors(moments, step=torch.tensor(float(seed)))}


def whole(state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {
        f"{part}.{name}": (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for part, tensors in state.items()
        for name, tensor in tensors.items()
    }


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def raised(kind: type[Exception], function, *args: object, **kwargs: object) -> str:
    """The message of the error that this rank got; the test fails if it got none."""
    with pytest.raises(kind) as error:
        function(*args, **kwargs)
    return str(error.value)


def save_sharded(root: Path, manager: str, mesh_shape: tuple[int, ...]) -> None:
    rng = {"rank": torch.tensor([dist.get_rank()])}
    Checkpointer(root, manager=manager).save(5, make_state(5, mesh_shape), info={"at": 7}, scalars={"x": 1}, rng=rng)


@MANAGERS
def test_state_moves_between_numbers_of_ranks(manager, tmp_path, run_ranks):
    # Catches shards that land in the wrong place, and generator states of another rank.
    root, expected = tmp_path / "checkpoints", whole(make_state(5))

    def load_sharded(mesh_shape: tuple[int, ...]) -> tuple[bool, int | None]:
        state = make_state(1, mesh_shape)
        loaded = Checkpointer(root).load(root / "global_step_5", state)
        assert (loaded.step, loaded.info, loaded.scalars) == (5, {"at": 7}, {"x": 1})
        rng = None if loaded.rng is None else int(loaded.rng["rank"])
        return same(whole(state), expected), rng

    run_ranks(lambda: save_sharded(root, manager, (2,)), 2)
    manifest = verify(root / "global_step_5")
    assert manifest.world_size == 2
    assert [mesh["sizes"] for mesh in manifest.mesh] == [[2]]
    assert run_ranks(lambda: load_sharded((2,)), 2) == [(True, 0), (True, 1)]
    assert run_ranks(lambda: load_sharded((4,)), 4) == [(True, None)] * 4
    plain = make_state(1)
    assert Checkpointer(root).load(root / "global_step_5", plain).rng is None
    assert same(whole(plain), expected)


@MANAGERS
def test_plain_state_becomes_sharded_and_hybrid(manager, tmp_path, run_ranks):
    # Catches plain tensors that do not load into DTensors, and replicas that are written twice or read wrongly.
    Checkpointer(tmp_path, manager=manager).save(1, make_state(1))
    expected = whole(make_state(1))

    def move() -> list[bool]:
        results = []
        checkpointer = Checkpointer(tmp_path, manager=manager)
        source, step = checkpointer.latest(), 1
        for mesh_shape in ((4,), (2, 2), (4, 1)):
            state = make_state(2, mesh_shape)
            checkpointer.load(source, state)
            results.append(same(whole(state), expected))
            step += 1
            source = checkpointer.save(step, state)
        return results

    assert run_ranks(move, 4) == [[True] * 3] * 4
    plain = make_state(2)
    Checkpointer(tmp_path).load(Checkpointer(tmp_path).latest(), plain)
    assert same(whole(plain), expected)
    sizes = [
        sum(record.size for record in verify(path).files.values()) for path in Checkpointer(tmp_path).checkpoints()
    ]
    if manager == "dcp":
        # Four shards of each tensor against two: replicas are not saved.
        assert sizes[2] < 0.75 * sizes[1]


class KillOnUse(Mapping[str, Tensor]):
    """Generator states that are asked for after the first files of a save have been written: this rank dies then."""

    def __getitem__(self, name: str) -> Tensor:
        raise KeyError(name)

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        os.kill(os.getpid(), signal.SIGKILL)
        return iter(())


class KillOnWrite(Tensors):
    """A state whose rank dies in the middle of writing it, when the disk takes no more."""

    def state_dict(self) -> dict[str, Tensor]:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, 1 << 12))
        return dict(self)


@pytest.mark.parametrize("moment", ["between files", "in a file"])
def test_save_that_was_killed_leaves_the_one_before(moment, tmp_path, run_ranks):
    # Catches a torn checkpoint that `auto` would resume from, and one that the next save stumbles over.
    root, told = tmp_path / "checkpoints", tmp_path / "told"
    before = Checkpointer(root)
    before.save(1, make_state(1))

    def torn() -> None:
        state, rng = make_state(2, (2,)), {}
        if dist.get_rank() == 1 and moment == "between files":
            rng = KillOnUse()
        elif dist.get_rank() == 1:
            state["large"] = KillOnWrite(x=torch.zeros(1 << 16))
        else:
            state["large"] = Tensors(x=torch.zeros(1 << 16))
        told.write_text(raised(Exception, Checkpointer(root).save, 2, state, rng=rng))
        # Nobody is left to leave the process group with.
        os._exit(0)

    assert run_ranks(torn, 2) == ["no result", "no result"]
    assert "peer" in told.read_text()
    assert before.latest() == root / "global_step_1"
    assert [path.name for path in before.checkpoints()] == ["global_step_1"]

    def again() -> bool:
        checkpointer, state = Checkpointer(root), make_state(3, (2,))
        checkpointer.load(checkpointer.resolve("auto"), state)
        checkpointer.save(2, state)
        return same(whole(state), whole(make_state(1)))

    assert run_ranks(again, 2) == [True, True]
    assert sorted(path.name for path in root.iterdir()) == ["global_step_1", "global_step_2", "latest"]
    verify(root / "global_step_2")


class FailingState(Tensors):
    def state_dict(self) -> dict[str, Tensor]:
        raise ArithmeticError("no state today")


@MANAGERS
def test_failure_of_one_rank_is_the_failure_of_all(manager, tmp_path, run_ranks):
    # Catches ranks that go on, or wait for ever, when another could not save; and what such a save leaves behind.
    def session() -> list[str]:
        rank, mesh_shape = dist.get_rank(), (2,)
        checkpointer = Checkpointer(tmp_path / "checkpoints", manager=manager, root_option="train.output_dir")
        checkpointer.save(1, make_state(1, mesh_shape))
        told = []
        state = make_state(2, mesh_shape)
        if rank == 1:
            state["optimizer"] = FailingState(state["optimizer"])
        told.append(raised(CheckpointFailure, checkpointer.save, 2, state))
        rng = {"x": "not a tensor"} if rank == 1 else {}
        told.append(raised(CheckpointError, checkpointer.save, 2, make_state(2, mesh_shape), rng=rng))
        full = 1 if manager == "dcp" else 0
        state = make_state(2, mesh_shape)
        state["large"] = Tensors(x=torch.zeros(1 << 14), y=torch.zeros(1 << 14), z=torch.zeros(1 << 14))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
        told.append(raised(CheckpointFailure, checkpointer.save, 2, state))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        dist.barrier()
        told.append(",".join(sorted(path.name for path in checkpointer.root.iterdir())))
        (tmp_path / "file").touch()
        elsewhere = Checkpointer(tmp_path / "file" / "x", manager=manager, root_option="train.output_dir")
        told.append(raised(CheckpointError, elsewhere.save, 2, make_state(2, mesh_shape)))
        told.append(checkpointer.save(2, make_state(2, mesh_shape)).name)
        return told

    first, second = run_ranks(session, 2)
    assert first == second
    assert "rank 1: ArithmeticError: no state today" in first[0]
    assert first[1].startswith("rng: the dict is not a mapping of names to tensors")
    assert f"rank {1 if manager == 'dcp' else 0}: OSError: [Errno 27] File too large" in first[2]
    assert first[3] == "global_step_1,latest"
    assert first[4].startswith("train.output_dir: cannot write to")
    assert first[5] == "global_step_2"


def test_what_is_wrong_with_a_checkpoint_is_told_on_every_rank(tmp_path, run_ranks):
    # Catches damage that only the rank which hashed the file knows of, and half of the ranks loading.
    run_ranks(lambda: save_sharded(tmp_path, "dcp", (2,)), 2)
    path = tmp_path / "global_step_5"
    target = tmp_path / "executed"

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(target),)

    def session() -> list[str]:
        mesh_shape, rank = (2,), dist.get_rank()
        checkpointer = Checkpointer(tmp_path)
        state = make_state(1, mesh_shape)
        told = []
        for name in sorted(verify(path).files):
            content = (path / name).read_bytes()
            dist.barrier()
            if rank == 0:
                (path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            dist.barrier()
            text = raised(CheckpointError, checkpointer.load, path, state)
            assert f"  {name} has changed" in text
            if rank == 0 and name == ".metadata":
                (path / name).write_bytes(pickle.dumps(Bomb()))
            dist.barrier()
            told.append(raised(CheckpointError, checkpointer.load, path, state))
            dist.barrier()
            if rank == 0:
                (path / name).write_bytes(content)
            dist.barrier()
        other = make_state(1, mesh_shape)
        other["model"]["extra"] = torch.zeros(2)
        del other["model"]["norm"]
        told.append(raised(CheckpointError, checkpointer.load, path, other))
        state = make_state(1, mesh_shape)
        told.append(raised(CheckpointError, checkpointer.load, path if rank == 0 else tmp_path, state))
        assert same(whole(state), whole(make_state(1))), "nothing was loaded"
        return told

    first, second = run_ranks(session, 2)
    assert first == second
    assert "missing from the checkpoint (1): model.extra" in first[-2]
    assert "only in the checkpoint (1): model.norm" in first[-2]
    assert "not a complete xorl checkpoint" in first[-1]
    assert not target.exists()


def test_ranks_that_save_different_checkpoints_all_raise(tmp_path, run_ranks):
    # Catches ranks that write two steps into one folder, and a rank that raises alone while the others wait for it.
    def session() -> list[str]:
        rank, checkpointer, state = dist.get_rank(), Checkpointer(tmp_path / "root"), make_state(1, (2,))
        told = [raised(CheckpointError, checkpointer.save, step, state) for step in (10 + rank, 10 + rank / 2)]
        checkpointer.save(10, state)
        return told

    first, second = run_ranks(session, 2)
    assert first == second
    assert first[0] == "step: the ranks save different checkpoints: step 10, step 11"
    assert "rank 1: step: 10.5 is not an int" in first[1]
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["global_step_10", "latest"]


def write_weights(folder: Path) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"wte": (11, 4), "q": (4, 4), "k": (2, 4), "v": (2, 4), "n": (3,), "s": (4, 5)}
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return tensors


class Unreadable:
    """Weights whose disk fails at one tensor."""

    def __init__(self, source: SafetensorsSource) -> None:
        self._source = source
        self.names, self.shape, self.dtype = source.names, source.shape, source.dtype

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        if name == "v":
            raise OSError("the disk is gone")
        return self._source.read(name, start, stop)


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_weights_arrive_alike_in_both_modes_and_leave_bit_for_bit(mesh_shape, tmp_path, run_ranks):
    # Catches rows of another rank, a rank that waits for ever when rank 0 cannot read, and exports that differ.
    tensors = write_weights(tmp_path / "weights")
    plain = {name: torch.empty(recipe.shape) for name, recipe in RECIPES.items()}
    load_weights(plain, RECIPES, SafetensorsSource(tmp_path / "weights"), mode="all_ranks")

    def session() -> tuple[list[bool], list[str]]:
        arrived, rank = [], dist.get_rank()
        source = SafetensorsSource(tmp_path / "weights")
        for mode in ("broadcast", "all_ranks"):
            for bucket_bytes in (1, 40, 1 << 20):
                params = make_state(1, mesh_shape)["model"]
                given = source if mode == "all_ranks" or rank == 0 else None
                report = load_weights(params, RECIPES, given, mode=mode, bucket_bytes=bucket_bytes)
                assert (report.bytes_read > 0) == (given is not None)
                arrived.append(same(whole({"": params}), whole({"": plain})))
        export_hf(params, RECIPES, tmp_path / "one", hf_config={}, dtype=torch.bfloat16)
        export_hf(params, RECIPES, tmp_path / "many", hf_config={}, dtype=torch.bfloat16, max_shard_bytes=50)
        broken = Unreadable(source)
        told = [
            raised(CheckpointFailure, load_weights, params, RECIPES, broken, mode="broadcast", bucket_bytes=40),
            raised(CheckpointError, export_hf, params, RECIPES, tmp_path / "one", hf_config={}),
            raised(CheckpointFailure, export_hf, params, RECIPES, tmp_path / "bad", hf_config={"x": rng_of(rank)}),
            raised(
                CheckpointError,
                load_weights,
                params,
                RECIPES if rank == 0 else {**RECIPES, "more": RECIPES["norm"]},
                source,
                mode="broadcast",
            ),
        ]
        return arrived, told

    results = run_ranks(session, 2 if mesh_shape == (2,) else 4)
    assert all(arrived == [True] * 6 for arrived, _ in results)
    assert all(told == results[0][1] for _, told in results)
    for text, expected in zip(
        results[0][1], ("the disk is gone", "already exists", "TypeError", "recipes"), strict=True
    ):
        assert expected in text
    assert not (tmp_path / "bad").exists()
    torch.testing.assert_close(load_file(tmp_path / "one" / "model.safetensors"), tensors, rtol=0, atol=0)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    torch.testing.assert_close(found, tensors, rtol=0, atol=0)


def rng_of(rank: int) -> object:
    """A value that is no JSON, on the rank that writes."""
    return object() if rank == 0 else 0
