"""One linear layer with a low-rank adapter beside its frozen weight. Which layers get one is decided elsewhere.

Shapes: I input features, O output features, R rank.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LoRALinear(nn.Module):
    """x @ W.T + bias + (alpha / rank) * (x @ A.T) @ B.T, with W and bias frozen (Hu et al., 2021, arXiv:2106.09685).

    A [R, I] starts Kaiming-uniform, in +-1/sqrt(I), and B [O, R] at zero, so the layer starts as its base. Both are
    fp32 whatever the base is: the updates of a small learning rate would vanish in bf16. The forward pass casts all
    weights to the dtype of x, and each product accumulates as torch's linear does there.

    `weight` and `bias` are the base's own parameters under its own names, so a checkpoint of the base still fits.

    Args:
        base: its parameters are taken over and frozen.
        rank: R.
        alpha: numerator of the scale.
        generator: where A is drawn from, on the CPU, whatever the device of the base.
    """

    weight: Tensor
    bias: nn.Parameter | None

    def __init__(self, base: nn.Linear, *, rank: int, alpha: float, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.rank = rank
        self.scale = alpha / rank
        self.weight = base.weight
        self.bias = base.bias
        self.requires_grad_(False)
        lora_a = torch.empty(rank, base.in_features, dtype=torch.float32, device="cpu")
        nn.init.kaiming_uniform_(lora_a, a=math.sqrt(5), generator=generator)
        device = base.weight.device
        self.lora_A = nn.Parameter(lora_a.to(device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, dtype=torch.float32, device=device))
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y = F.linear(x, self.weight.to(x.dtype), bias)  # [..., O]
        low = F.linear(x, self.lora_A.to(x.dtype)) * self.scale  # [..., R]: scaled here, where it is small
        return y + F.linear(low, self.lora_B.to(x.dtype))

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"{self.in_features}, {self.out_features}, bias={bias}, rank={self.rank}, scale={self.scale}"
