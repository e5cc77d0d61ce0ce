"""Grouped products: each token meets the weight of its group, forward and backward."""

import pytest
import torch
from torch import Tensor

from xorl.kernels.grouped_linear import TokenGroups, grouped_linear
from xorl.kernels.testing import assert_matches_reference


def one_by_one(runs: list[tuple[int, int]]):
    def product(x: Tensor, weight: Tensor, addend: Tensor) -> Tensor:
        weights = [index for index, length in runs for _ in range(length)]
        return torch.stack([weight[index] @ row for index, row in zip(weights, x, strict=True)]) + addend

    return product


@pytest.mark.parametrize("runs", [[(0, 5), (1, 7), (2, 1)], [(2, 3), (0, 10)], [(1, 13)], [(3, 0), (1, 6), (0, 7)]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_token_meets_the_weight_of_its_group(runs, dtype):
    """Catches groups in another order than the weights, an empty group, and a gradient in the wrong weight."""
    generator = torch.Generator().manual_seed(0)
    x, weight, addend = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((13, 6), (4, 9, 6), (13, 9)))
    groups = TokenGroups.of(runs, 4)

    def grouped(x: Tensor, weight: Tensor, addend: Tensor) -> Tensor:
        return grouped_linear(x, weight, groups, addend)

    assert_matches_reference(grouped, one_by_one(runs), [x, weight, addend])


def test_one_compilation_serves_every_split():
    """Catches groups that became constants of compiled code: each new mixture would be compiled for, or be wrong."""
    compilations = 0

    def counting(graph, example_inputs):
        nonlocal compilations
        compilations += 1
        return graph

    weight = torch.randn(3, 4, 5)
    compiled = torch.compile(lambda x, groups: grouped_linear(x, weight, groups), fullgraph=True, backend=counting)
    for runs in ([(0, 8)], [(2, 3), (1, 5)], [(1, 2), (2, 2), (0, 7)]):
        x = torch.randn(sum(length for _, length in runs), 5)
        torch._dynamo.mark_dynamic(x, 0)
        groups = TokenGroups.of(runs, 3)
        torch.testing.assert_close(compiled(x, groups), grouped_linear(x, weight, groups))
    assert compilations == 1


def test_tokens_of_one_weight_must_be_neighbours():
    """Catches a row in which a second group of a weight would silently replace the first."""
    with pytest.raises(ValueError, match="must be adjacent"):
        TokenGroups.of([(0, 2), (1, 3), (0, 1)], 2)
