"""The interface of attention backends: the attention function, and the requests that backends accept or refuse."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from xorl.kernels.arguments import check_at_least, check_device_type, check_floating, check_type
from xorl.kernels.attention.kernel import AttentionSpec
from xorl.kernels.layout import SequenceLayout, ShardedLayout


class AttentionFn(Protocol):
    """Attention inside each document of a packed row, causal or not; documents never see each other.

    Shapes: T tokens, H query heads, G key/value heads (G divides H, query head h reads key/value head h * G // H),
    C channels of a head, V channels of a head of values, usually C. q is [T, H, C], k [T, G, C] and v [T, G, V]. The
    result is [T, H, V] in q's dtype; the softmax accumulates in fp32 at least.

    sinks: [H], a score of each head that takes part in the softmax and has no value, so that the weights of the keys
        add up to less than 1; it is neither scaled nor capped. Differentiable. None: none.

    Its outputs are differentiable once: a gradient of a gradient is refused.

    Raises ValueError for shapes that do not fit each other or the layout, dtypes that differ or are not of floating
    point, a window below 1, or one where attention is not causal; and for rings whose attention is not causal.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor: ...

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """The output, and the natural log-sum-exp of each token's scaled scores, [T, H] in fp32 (fp64 for fp64)."""
        ...

    def in_ring(
        self, q: Tensor, k: Tensor, v: Tensor, layout: ShardedLayout, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        """The output for the tokens of a ring rank: q, k and v are of its segments of the row. Collective."""
        ...


@dataclass(frozen=True)
class AttentionRequest:
    """The requirements of a model for an attention backend, as far as is known when the model is built.

    Attributes:
        device_type: "cpu", "cuda", ...
        dtype: the dtype of q, k and v (the compute dtype).
        head_dim: C, or V if values have more channels.
        window: the sliding window of the layers that have one, or None.
        deterministic: whether the same inputs must give the same bits in outputs and gradients; the default is torch's
            current setting.
        softcap: the cap on scores, or None.
        sinks: whether heads have sinks.
        causal: whether tokens see earlier ones only.

    Raises ValueError for values of other types.
    """

    device_type: str
    dtype: torch.dtype
    head_dim: int
    window: int | None = None
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)
    softcap: float | None = None
    sinks: bool = False
    causal: bool = True

    def __post_init__(self) -> None:
        check_device_type(self.device_type)
        check_floating("dtype", self.dtype)
        check_at_least("head_dim", self.head_dim, 1)
        check_at_least("window", self.window, 1, optional=True)
        check_type("deterministic", self.deterministic, bool, "False")
        check_type("causal", self.causal, bool, "True")

    def __str__(self) -> str:
        words = f"device={self.device_type} dtype={str(self.dtype).removeprefix('torch.')} head_dim={self.head_dim}"
        for name in ("window", "softcap", "sinks", "deterministic"):
            words += f" {name}={value}" if (value := getattr(self, name)) else ""
        return words if self.causal else f"{words} causal=False"
