"""Optimizers on sharded and replicated parameters do what they do on whole ones; uneven shards and odd shapes."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from ranks import Launch, Launches
from xorl.core.optim import MuonOptions, OptimizerName, build_optimizer, gradient_norms, gradient_scale
from xorl.core.optim.clip import Rest

# Rows that two and four ranks cut unevenly, and one matrix of which some ranks hold nothing.
SHAPES = {"wide": (5, 24), "tall": (26, 6), "square": (7, 7), "fused": (22, 10), "last": (26, 6), "vector": (11,)}
MATRICES = {"wide": (5,), "tall": (26,), "square": (7,), "fused": (12, 4, 6), "last": (13, 13)}
LAYOUTS = {"none": 1, "shard-1": 1, "shard-2": 2, "shard-4": 4, "hsdp-2x2": 4, "replicate-4": 4}
NUM_STEPS = 3
KINDS: list[tuple[OptimizerName, torch.dtype]] = [("anyprecision_adamw", torch.bfloat16), ("muon", torch.float32)]
ALIKE = ("hsdp-2x2", "replicate-4")


def placed(tensor: Tensor, layout: str) -> Tensor:
    kind, _, size = layout.partition("-")
    if kind == "shard":
        return distribute_tensor(tensor, init_device_mesh("cpu", (int(size),)), [Shard(0)])
    if kind == "hsdp":
        return distribute_tensor(tensor, init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)])
    return tensor


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(layout: str, name: OptimizerName, dtype: torch.dtype, skipped: int = -1) -> dict[str, Tensor]:
    """Whole parameters and states after some steps with given gradients; one step has none that is finite."""
    generator = torch.Generator().manual_seed(0)
    parameters = {
        key: nn.Parameter(placed(torch.randn(shape, generator=generator).to(dtype), layout))
        for key, shape in SHAPES.items()
    }
    replicas = dist.group.WORLD if layout.startswith("replicate") else None
    muon = MuonOptions(MATRICES, lr=0.02, adjust_lr="match_rms_adamw", replicas=replicas)
    optimizer = build_optimizer(
        name, parameters.items(), lr=1e-2, weight_decay=0.1, state_dtype=dtype, seed=3, muon=muon
    )
    for step in range(NUM_STEPS):
        for key, parameter in parameters.items():
            gradient = torch.randn(SHAPES[key], generator=generator).to(dtype)
            parameter.grad = placed(gradient * (float("nan") if step == skipped else 1.0), layout)
        optimizer.found_inf = torch.tensor(float(step == skipped))
        optimizer.step()
    states = {
        f"{key}.{name}": full(state)
        for key, parameter in parameters.items()
        for name, state in optimizer.state[parameter].items()
    }
    return {key: full(parameter).detach() for key, parameter in parameters.items()} | states


def norms() -> tuple[list[float], int]:
    # Two ways of sharding: over all four ranks, and over two, of which the others hold other rows.
    mesh, rank = init_device_mesh("cpu", (2, 2), mesh_dim_names=("others", "shard")), dist.get_rank()
    first = nn.Parameter(distribute_tensor(torch.zeros(8, 2), mesh, [Replicate(), Shard(0)]))
    second = nn.Parameter(distribute_tensor(torch.zeros(8, 2), mesh["shard"], [Shard(0)]))
    divided = {second: Rest((mesh.get_group("others"),))}
    if rank in (0, 2):
        first.grad = torch.ones_like(first)
    if rank == 1:
        second.grad = torch.full_like(second, 2.0)
    num_reductions = 0
    with pytest.MonkeyPatch.context() as patch:
        reduce = dist.all_reduce

        def counted(tensor: Tensor, group: dist.ProcessGroup) -> None:
            nonlocal num_reductions
            num_reductions += 1
            reduce(tensor, group=group)

        patch.setattr(dist, "all_reduce", counted)
        found = gradient_norms([[first], [second], [first, second]], divided)
    scale, _ = gradient_scale([first, second], 1.0, None, divided=divided)
    return [*found.tolist(), scale.item()], num_reductions


def error_of_another_placement() -> str:
    mesh = init_device_mesh("cpu", (2,))
    parameter = DTensor.from_local(torch.ones(2, 2), mesh, [_StridedShard(0, split_factor=2)], run_check=False)
    try:
        gradient_norms([[parameter]])
    except AssertionError as error:
        return str(error)
    return "no error"


@pytest.fixture(scope="module")
def found(launch: Launch) -> Launches:
    """By what is computed and layout: the table of this module."""
    cells = {}
    for (layout, size), (name, dtype) in product(LAYOUTS.items(), KINDS):
        cells["trained", layout, name] = (size, partial(train, layout, name, dtype))
    for layout in ALIKE:
        cells["alike", layout] = (4, partial(train, layout, "muon", torch.bfloat16, skipped=1))
    cells["norms",] = (4, norms)
    cells["error",] = (2, error_of_another_placement)
    return launch(cells)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "none"])
def test_sharded_optimizers_do_what_whole_ones_do(layout: str, found: Launches) -> None:
    # Catches random bits that depend on the shard, rows that reach the wrong matrix or come back to the wrong place,
    # and a rank without rows or without a matrix of its own that leaves the others alone in a collective.
    for name, _ in KINDS:
        [expected] = found("trained", "none", name)
        for state in found("trained", layout, name):
            for key, tensor in state.items():
                wanted = expected[key]
                if name == "muon" and key in MATRICES:
                    assert (tensor - wanted).norm() <= 1e-5 * wanted.norm(), key
                else:
                    # Elementwise, and so to the bit, bf16 rounding included.
                    torch.testing.assert_close(tensor, wanted, rtol=0, atol=0)
            assert state.keys() == expected.keys()


@pytest.mark.parametrize("layout", ALIKE)
def test_replicas_and_shards_of_bf16_weights_stay_alike(layout: str, found: Launches) -> None:
    # Catches replicas that round differently and drift apart, and weights that a skipped step poisons on some rank.
    first, *others = found("alike", layout)
    for state in (first, *others):
        torch.testing.assert_close(state, first, rtol=0, atol=0)
        assert all(bool(tensor.isfinite().all()) for tensor in state.values())
        assert {int(state[f"{key}.step"]) for key in SHAPES} == {NUM_STEPS - 1}


def test_the_norm_is_the_same_whatever_has_a_gradient(found: Launches) -> None:
    # Catches a rank that has no gradients and leaves the others waiting, reductions in an order that depends on which
    # gradients a rank has, and one reduction for each set of parameters.
    # 4 rows of 2 ones, of which ranks 0 and 2 hold copies; 4 rows of 2 twos on one rank of four.
    for measured, num_reductions in found("norms"):
        assert measured == pytest.approx([8**0.5, 32**0.5, 40**0.5, 40**0.5])
        assert num_reductions == 3


def test_a_placement_that_cannot_be_summed_is_an_error(found: Launches) -> None:
    # Catches rows that are taken for copies: this placement is none of torch's Shard.
    assert all("cannot be summed" in message for message in found("error"))
