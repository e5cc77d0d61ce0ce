"""Initial weights drawn on a GPU."""

import pytest
import torch

from xorl.core.models.initial import fill_normal_

pytestmark = pytest.mark.gpu


def drawn(device: str, shape: tuple[int, int], offset: tuple[int, int], rows: int) -> torch.Tensor:
    part = torch.full((rows, shape[1]), torch.nan, device=device)
    fill_normal_(part, std=1.0, key=-(2**62) + 12345, shape=shape, offset=offset)
    return part.cpu()


def test_gpu_draws_what_the_cpu_draws() -> None:
    # Catches 64-bit arithmetic that does not wrap around alike, and chunks of the GPU's size that do not join.
    shape = (200_000, 111)  # more than one chunk, an odd row, pairs that lie across rows
    on_gpu = drawn("cuda", shape, (0, 0), shape[0])
    on_cpu = drawn("cpu", shape, (0, 0), shape[0])
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-5, atol=2e-6)
    assert torch.equal(drawn("cuda", shape, (170_001, 0), 5), on_gpu[170_001:170_006])


def test_values_computed_on_the_gpu_for_parameters_in_host_memory() -> None:
    # Catches offloaded parameters that would take minutes to fill on the CPU, or get other values.
    part = torch.empty(1000, 64, dtype=torch.bfloat16)
    fill_normal_(part, std=0.02, key=3, shape=part.shape, offset=(0, 0), device=torch.device("cuda"))
    resident = torch.empty(1000, 64, dtype=torch.bfloat16, device="cuda")
    fill_normal_(resident, std=0.02, key=3, shape=part.shape, offset=(0, 0))
    assert torch.equal(part, resident.cpu())
