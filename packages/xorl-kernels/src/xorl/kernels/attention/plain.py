"""An attention function of a user's own, written in plain torch, as a backend."""

from typing import Protocol

from torch import Tensor

from xorl.kernels.attention.kernel import AttentionSpec
from xorl.kernels.attention.operator import check_inputs
from xorl.kernels.layout import SequenceLayout, ShardedLayout


class PlainAttention(Protocol):
    """The formula of `AttentionFn.__call__`, in operations that autograd differentiates."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, *, scale: float, window: int | None
    ) -> Tensor: ...


class FunctionAttention:
    """An `AttentionFn` that calls `function` and computes nothing else: no log-sum-exp, and no rings of ranks."""

    def __init__(self, name: str, function: PlainAttention) -> None:
        self.name = name
        self.function = function

    def __deepcopy__(self, memo: object) -> "FunctionAttention":
        return self  # as for a function

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        check_inputs(q, k, v, layout, spec, sinks)
        for name, value in (("spec.softcap", spec.softcap), ("sinks", sinks)):
            if value is not None:
                raise ValueError(f"{name}: attention backend {self.name!r} computes none; register a PackedAttention")
        if not spec.causal:
            raise ValueError(f"spec.causal: attention backend {self.name!r} is causal; register a PackedAttention")
        out = self.function(q, k, v, layout, scale=spec.scale, window=spec.window)
        shape = (*q.shape[:2], v.shape[2])
        if not isinstance(out, Tensor) or out.shape != shape or out.dtype != q.dtype:
            returned = f"{list(out.shape)} in {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"function: {self.name} must return {list(shape)} in {q.dtype}, but returned {returned}")
        return out

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Raises RuntimeError: the function returns no log-sum-exp."""
        raise RuntimeError(f"attention backend {self.name!r} returns no log-sum-exp; register a PackedAttention for it")

    def in_ring(
        self, q: Tensor, k: Tensor, v: Tensor, layout: ShardedLayout, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        """Raises RuntimeError: a ring needs the log-sum-exp."""
        raise RuntimeError(f"attention backend {self.name!r} cannot share rows in a ring; register a PackedAttention")
