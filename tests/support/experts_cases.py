"""Layers of experts with random weights and routes, for tests of their kernels."""

import torch
from torch import Tensor

# T, K, D, F, E: all different, so that no transposed or swapped operand fits.
SHAPES = [(37, 3, 24, 16, 7), (5, 1, 8, 40, 3), (64, 8, 16, 8, 11)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """x, gate_up, down, weights."""
    num_tokens, num_choices, width, inner, num_experts = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = [
        normal(num_tokens, width).to(dtype),
        (normal(num_experts, 2 * inner, width) / width**0.5).to(dtype),
        (normal(num_experts, width, inner) / inner**0.5).to(dtype),
        torch.rand(num_tokens, num_choices, generator=generator, dtype=torch.float64).to(wide),
    ]
    return [tensor.requires_grad_() for tensor in tensors]


def routes(kind: str, shape: tuple[int, ...]) -> Tensor:
    """[T, K] ids: random ones, all tokens to the same experts, or none to the first expert."""
    num_tokens, num_choices, _, _, num_experts = shape
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    if kind == "same":
        scores = scores[:1].expand(num_tokens, -1)
    if kind == "none to the first" and num_choices < num_experts:
        scores = scores.clone()
        scores[:, 0] = -1.0
    return scores.topk(num_choices).indices


def gradients(out: Tensor, tensors: list[Tensor], seed: int = 3) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return torch.autograd.grad(out, tensors, grad)


def without(share: float, shape: tuple[int, ...]) -> Tensor:
    """Random routes, of which about this share, or nearly all, are choices without an expert."""
    is_absent = torch.rand(shape[:2], generator=torch.Generator().manual_seed(2)) < (1 if share > 0.9 else share)
    return torch.where(is_absent, shape[4], routes("random", shape))
