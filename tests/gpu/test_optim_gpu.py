"""Optimizers on GPUs: the kernels against their plain twins, and sharded updates against those of one GPU."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from xorl.ckpt import OptimizerState
from xorl.core import runtime
from xorl.core.optim import MuonOptions, OptimizerName, build_optimizer, gradient_scale
from xorl.core.optim.newton_schulz import orthogonalise

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
KERNEL_TESTS = ROOT / "packages" / "xorl-kernels" / "tests" / "test_kernels_optim.py"
# Several matrices of a shape, a fused one, rows that no number of GPUs above one divides, and a parameter whose 2**31
# elements and more a 32-bit index would lose, which is updated on one GPU alone.
SHAPES = {"a": (512, 256), "b": (512, 256), "fused": (769, 256), "tall": (1021, 67), "tiny": (3, 256), "norm": (257,)}
MATRICES = {"a": (512,), "b": (512,), "fused": (256, 256, 257), "tall": (1021,), "tiny": (3,)}
HUGE = 2**31 + 2**20 + 3


def train(
    name: OptimizerName,
    dtype: torch.dtype,
    *,
    mesh: DeviceMesh | None = None,
    replicas: dist.ProcessGroup | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(parameters, state), whole, after three steps with given gradients."""

    def placed(tensor: Tensor) -> Tensor:
        if mesh is None:
            return tensor
        return distribute_tensor(tensor, mesh, [Replicate()] * (mesh.ndim - 1) + [Shard(0)])

    generator = torch.Generator().manual_seed(0)

    def random(key: str) -> Tensor:
        return placed(torch.randn(SHAPES[key], generator=generator).to("cuda", dtype))

    parameters = {key: nn.Parameter(random(key)) for key in SHAPES}
    muon = MuonOptions(MATRICES, replicas=replicas, compute_dtype=compute_dtype)
    optimizer = build_optimizer(name, parameters.items(), lr=1e-2, weight_decay=0.1, state_dtype=dtype, muon=muon)
    for _ in range(3):
        for key, parameter in parameters.items():
            parameter.grad = random(key)
        optimizer.grad_scale, optimizer.found_inf = torch.full((), 3.0, device="cuda"), torch.zeros((), device="cuda")
        optimizer.step()
    state = OptimizerState(optimizer, parameters.items()).state_dict()
    return whole(parameters), whole(state)


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: (x.full_tensor() if isinstance(x, DTensor) else x).detach() for key, x in tensors.items()}


def compare_ranks() -> None:
    """What each rank runs: every placement on all GPUs against one GPU's own steps."""
    runtime.init("cuda")
    world_size = dist.get_world_size()
    meshes: dict[str, DeviceMesh | None] = {"shard": init_device_mesh("cuda", (world_size,)), "replicate": None}
    if world_size % 2 == 0:
        meshes["hsdp"] = init_device_mesh("cuda", (2, world_size // 2))
    exact, half = torch.float32, torch.bfloat16
    for placement, mesh in meshes.items():
        replicas = dist.group.WORLD if mesh is None else None
        for dtype in (exact, half):
            for name in ("adamw", "anyprecision_adamw", "sgd"):
                got, wanted = train(name, dtype, mesh=mesh), train(name, dtype)
                torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        for compute, limit in ((exact, 1e-5), (half, 1e-2)):
            parameters, state = train("muon", exact, mesh=mesh, replicas=replicas, compute_dtype=compute)
            alone, alone_state = train("muon", exact, compute_dtype=compute)
            torch.testing.assert_close(state, alone_state, rtol=0, atol=0)
            for key, value in parameters.items():
                error = float((value - alone[key]).norm() / alone[key].norm())
                assert error <= limit, f"{placement} {key}: off by {error:.1e} of its norm, computed in {compute}"
        parameters, _ = train("muon", half, mesh=mesh, replicas=replicas)
        for key, value in parameters.items():
            first = value.clone()
            dist.broadcast(first, src=0)
            assert first.equal(value), f"{placement} {key}: ranks hold different values"
    runtime.shutdown()


def test_kernels_match_their_twins() -> None:
    # Catches what Triton's interpreter cannot show: the compiled kernels' rounding, masks and integer arithmetic.
    command = [sys.executable, str(KERNEL_TESTS), "cuda"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert result.returncode == 0, result.stderr[-4000:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_does_what_that_of_torch_does(dtype: torch.dtype) -> None:
    # Catches compiled arithmetic, rounding or a scale of gradients that differ from torch's fused kernels.
    generator = torch.Generator().manual_seed(0)
    shapes = {"large": (4097, 515), "aligned": (64, 1024), "small": (3,), "scalar": ()}
    start = {key: torch.randn(shape, generator=generator).to("cuda", dtype) for key, shape in shapes.items()}
    ours, theirs, exact = (
        {key: nn.Parameter(value.to(kind, copy=True)) for key, value in start.items()}
        for kind in (dtype, dtype, torch.float64)
    )
    hyper = {"lr": 1e-2, "weight_decay": 0.1}
    own = build_optimizer("adamw", ours.items(), **hyper)
    fused = torch.optim.AdamW(theirs.values(), **hyper, fused=True)
    wide = torch.optim.AdamW(exact.values(), **hyper)
    own.grad_scale = fused.grad_scale = torch.full((), 3.0, device="cuda")
    fused.found_inf = torch.zeros((), device="cuda")
    for _ in range(10):
        for key, parameter in ours.items():
            gradient = torch.randn(shapes[key], generator=generator).to("cuda", dtype)
            parameter.grad, theirs[key].grad, exact[key].grad = gradient, gradient.clone(), gradient.double() / 3
        for optimizer in (own, fused, wide):
            optimizer.step()
    for key, parameter in ours.items():
        if dtype == torch.float32:
            torch.testing.assert_close(parameter.double(), exact[key], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(parameter, theirs[key], rtol=1e-5, atol=1e-6)
        else:
            # Of values that are rounded to bf16 ten times neither is right; ours must be no further off than torch's.
            errors = [float((values.double() - exact[key]).norm()) for values in (parameter, theirs[key])]
            assert errors[0] <= 1.05 * errors[1] + 2**-6, f"{key}: {errors}"
    for parameter in ours.values():
        parameter.grad = torch.full_like(parameter, float("nan"))
    before = {key: parameter.detach().clone() for key, parameter in ours.items()}
    own.found_inf = torch.ones((), device="cuda")
    own.step()
    torch.testing.assert_close({key: p.detach() for key, p in ours.items()}, before, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["adamw", "anyprecision_adamw", "sgd", "muon"])
def test_step_does_not_wait_for_the_device(name: OptimizerName) -> None:
    # Catches a scale, a flag, a step count or a table of addresses for which the host stands still.
    parameters = {key: nn.Parameter(torch.randn(shape, device="cuda")) for key, shape in SHAPES.items()}
    optimizer = build_optimizer(name, parameters.items(), lr=1e-2, weight_decay=0.1, muon=MuonOptions(MATRICES))
    for _ in range(3):
        for parameter in parameters.values():
            parameter.grad = torch.randn_like(parameter)
        torch.cuda.set_sync_debug_mode("error")
        try:
            norm, optimizer.grad_scale = gradient_scale(list(parameters.values()), 3.0, 1.0)
            optimizer.found_inf = (~torch.isfinite(norm)).float()
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["adamw", "anyprecision_adamw", "sgd"])
def test_parameter_of_more_than_two_to_the_31_elements(
    name: OptimizerName, require_memory: Callable[[int], None]
) -> None:
    # Catches offsets in 32 bits: the end of a large embedding or of stacked experts would stay as it is.
    require_memory(40)
    parameter = nn.Parameter(torch.ones(HUGE, dtype=torch.bfloat16, device="cuda"))
    optimizer = build_optimizer(name, [("huge", parameter)], lr=0.5, weight_decay=0.0)
    parameter.grad = torch.ones_like(parameter)
    norm, _ = gradient_scale([parameter], 1.0, None)
    assert norm.item() == pytest.approx(HUGE**0.5, rel=1e-6)
    optimizer.step()
    for end in (slice(0, 1000), slice(2**31 - 500, 2**31 + 500), slice(HUGE - 1000, HUGE)):
        torch.testing.assert_close(parameter.detach()[end].float().mean().item(), 0.5, rtol=1e-2, atol=0)


def test_orthogonalisation_in_bf16_is_close_to_that_in_fp32() -> None:
    # Catches products accumulated in half precision: five iterations would no longer get the small singular values up.
    for shape in ((3, 512, 1024), (2, 1024, 512)):
        batch = torch.randn(shape, generator=torch.Generator().manual_seed(0)).cuda()
        exact, half = orthogonalise(batch, 5), orthogonalise(batch.bfloat16(), 5)
        assert (half.float() - exact).norm() / exact.norm() < 2e-2
        values = torch.linalg.svdvals(half.float())
        assert values.max() < 1.3
        assert values.min() > 0.2


def test_placements_on_all_gpus_agree_with_one() -> None:
    # Catches an exchange that NCCL orders or rounds differently, and replicas that drift apart.
    num_gpus = torch.cuda.device_count()
    if num_gpus < 2:
        pytest.skip("this host has one GPU")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_gpus}", __file__]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert result.returncode == 0, result.stderr[-6000:]


if __name__ == "__main__":
    compare_ranks()
