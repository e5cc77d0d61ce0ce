"""Initial weights: any part can be made alone, and the numbers are normal and independent."""

import math

import pytest
import torch

from xorl.core.models.initial import fill_drawn_, fill_normal_, key_of, normal
from xorl.core.nn.roles import LogUniform

CPU = torch.device("cpu")


def whole(shape: tuple[int, ...], key: int = 7) -> torch.Tensor:
    tensor = torch.empty(shape)
    fill_normal_(tensor, std=1.0, key=key, shape=shape, offset=(0,) * len(shape))
    return tensor


@pytest.mark.parametrize("shape", [(1001, 333), (5, 7, 3), (17,)])
@pytest.mark.parametrize("cut", [(0, 1), (3, 5), (2, 4)])
def test_any_box_has_the_values_of_the_whole(shape: tuple[int, ...], cut: tuple[int, int]) -> None:
    # Catches values that depend, in the last bit even, on where a chunk or a shard begins.
    full = whole(shape)
    box = tuple(slice(cut[0] if axis < 2 else 0, cut[1]) for axis in range(len(shape)))
    part = torch.full_like(full[box], torch.nan)
    fill_normal_(part, std=1.0, key=7, shape=shape, offset=[edge.start for edge in box])
    assert torch.equal(part, full[box])


def test_a_part_of_another_dtype_is_the_rounded_whole_and_an_empty_one_is_left_alone() -> None:
    # Catches draws in half precision, and a rank with no rows of a small parameter.
    half = torch.empty(9, 4, dtype=torch.bfloat16)
    fill_normal_(half, std=1.0, key=7, shape=(9, 4), offset=(0, 0))
    assert torch.equal(half, whole((9, 4)).bfloat16())
    fill_normal_(torch.empty(0, 4), std=1.0, key=7, shape=(9, 4), offset=(9, 0))


def test_logarithms_of_uniform_values_fill_their_range_evenly() -> None:
    # Catches bounds that are swapped, exceeded or never reached, and a part that depends on where it begins.
    full = torch.empty(10_001)
    fill_drawn_(full, LogUniform(0.01, 16.0), key=7, shape=full.shape, offset=(0,))
    part = torch.empty(11)
    fill_drawn_(part, LogUniform(0.01, 16.0), key=7, shape=full.shape, offset=(900,))
    assert torch.equal(part, full[900:911])
    values = full.exp()
    assert 0.01 <= values.min() < 0.03
    assert 15.98 < values.max() <= 16.0
    assert values.mean() == pytest.approx(8.0, abs=0.15)


def test_values_are_standard_normal() -> None:
    # Catches a broken hash or transform: moments, and the whole distribution by Kolmogorov-Smirnov's distance.
    count = 1 << 21
    values = normal(key_of(0, "a", (1,)), 0, count, CPU).double()
    error = 5 / math.sqrt(count)
    assert abs(values.mean()) < error
    assert abs(values.square().mean() - 1) < error * math.sqrt(2)
    assert abs(values.pow(3).mean()) < error * math.sqrt(15)
    assert abs(values.pow(4).mean() - 3) < error * math.sqrt(96)
    expected = 0.5 * (1 + torch.erf(values.sort().values / math.sqrt(2)))
    assert (expected - torch.arange(1, count + 1) / count).abs().max() < 2.2 / math.sqrt(count)
    assert 4.5 < values.abs().max() < 6.8


def test_rows_neighbours_and_parameters_are_independent() -> None:
    # Catches streams that overlap or resemble each other: rows of a matrix, its neighbours, layers that differ in name.
    size = 1 << 10
    matrices = [whole((size, size), key_of(0, f"layers.{i}.weight", (size, size))) for i in range(3)]
    for other in (matrices[1], matrices[2], matrices[0].roll(1), matrices[0].roll(1, 0), matrices[0].T):
        off_diagonal = (matrices[0] * other).fill_diagonal_(0.0)
        assert abs(off_diagonal.mean()) < 5 / size
    rows = matrices[0] @ matrices[0].T / math.sqrt(size)  # standard normal off the diagonal
    assert rows.fill_diagonal_(0.0).abs().max() < 6.5
    # Marchenko and Pastur: the largest singular value of independent entries is close to 2 sqrt(size).
    assert torch.linalg.matrix_norm(matrices[0], 2) == pytest.approx(2 * math.sqrt(size), rel=0.03)
