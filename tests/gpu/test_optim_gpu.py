"""Optimizers on GPUs: the kernels against their plain twins, and sharded updates against those of one GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from xorl.core import runtime
from xorl.core.optim import MuonOptions, OptimizerName, OptimizerState, build_optimizer
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
        optimizer.found_inf = torch.zeros((), device="cuda")
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
            got, wanted = train("anyprecision_adamw", dtype, mesh=mesh), train("anyprecision_adamw", dtype)
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


def test_parameter_of_more_than_two_to_the_31_elements() -> None:
    # Catches offsets in 32 bits: the end of a large embedding or of stacked experts would stay as it is.
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("less than 40 GiB of GPU memory are free")
    parameter = nn.Parameter(torch.ones(HUGE, dtype=torch.bfloat16, device="cuda"))
    optimizer = build_optimizer("anyprecision_adamw", [("huge", parameter)], lr=0.5, weight_decay=0.0)
    parameter.grad = torch.ones_like(parameter)
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
