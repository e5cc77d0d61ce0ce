"""A base model's weights with an adapter merged in, read by ranges of rows.

Shapes: O output features, I input features, R rank, N rows in one read.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from xorl.core.models.recipes import WeightSource
from xorl.lora.peft.fit import differences
from xorl.lora.peft.layout import AdapterLayout


@dataclass(frozen=True)
class AdapterValues:
    """An adapter's values: A [R, I], B [O, R] and, for DoRA, magnitudes [O]; `scale` multiplies B @ A."""

    a: Tensor
    b: Tensor
    magnitude: Tensor | None
    scale: float

    @classmethod
    def of_file(cls, module: str, layout: AdapterLayout, source: WeightSource) -> "AdapterValues":
        """The values of one module in an adapter file."""
        adapted = layout.modules[module]
        return cls(
            source.read(adapted.a),
            source.read(adapted.b),
            None if adapted.magnitude is None else source.read(adapted.magnitude),
            layout.config.spec.scale_of(module),
        )


def fold(rows: Tensor, adapter: AdapterValues, *, start: int = 0, transposed: bool = False) -> Tensor:
    """Rows [start, start + N) of a weight with its adapter merged in, in fp32 (fp64 for an fp64 weight).

    W + scale * B @ A (Hu et al., 2021, arXiv:2106.09685). With magnitudes, each output feature is scaled to its
    magnitude as norm (Liu et al., 2024, arXiv:2402.09353).

    Args:
        rows: [N, I]; or [N, O] if the weight is stored `transposed`, like those of embeddings.
        start: the index of the first row. With magnitudes, a transposed weight must be whole, because norms reduce over
            its rows.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    a, b = (tensor.to(rows.device, wide) for tensor in (adapter.a, adapter.b))
    stop = start + rows.shape[0]
    if transposed:
        merged = torch.addmm(rows.to(wide), a[:, start:stop].t(), b.t(), alpha=adapter.scale)  # [N, O]
    else:
        merged = torch.addmm(rows.to(wide), b[start:stop], a, alpha=adapter.scale)  # [N, I]
    if adapter.magnitude is None:
        return merged
    magnitude = adapter.magnitude.to(rows.device, wide).flatten()  # [O]
    if transposed:
        assert rows.shape[0] == a.shape[1], "the norms of a transposed weight need all of its rows"
        return merged * (magnitude / torch.linalg.vector_norm(merged, dim=0))
    factor = magnitude[start:stop] / torch.linalg.vector_norm(merged, dim=1)
    return merged * factor[:, None]


class MergedWeights:
    """A `WeightSource` of a base model with adapters merged in; adapted tensors are fp32.

    Args:
        base: the base's tensors, under the names of transformers.
        adapters: the adapters by module name.
        replaced: tensors that replace those of the base, by name.
        transposed: the modules whose weight is stored as [I, O].
    """

    def __init__(
        self,
        base: WeightSource,
        adapters: Mapping[str, AdapterValues],
        *,
        replaced: Mapping[str, Tensor],
        transposed: Collection[str] = (),
    ) -> None:
        self._base = base
        self._adapters = {f"{module}.weight": adapter for module, adapter in adapters.items()}
        self._replaced = replaced
        self._transposed = {f"{module}.weight" for module in transposed}

    @classmethod
    def of_file(cls, base: WeightSource, layout: AdapterLayout, source: WeightSource) -> "MergedWeights":
        """Merge an adapter file into a base. Raises ValueError if it does not fit, as `differences` tells."""
        shapes = {name: base.shape(name) for name in base.names()}
        if problems := differences(layout, shapes):
            raise ValueError(f"base: the adapter does not fit: {'; '.join(problems[:5])}")
        transposed = [
            name
            for name, module in layout.modules.items()
            if module.kind == "embedding" or layout.config.fan_in_fan_out
        ]
        return cls(
            base,
            {module: AdapterValues.of_file(module, layout, source) for module in layout.modules},
            replaced={name: source.read(key) for name, key in layout.replaced.items()},
            transposed=transposed,
        )

    def names(self) -> Collection[str]:
        return self._base.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        if name in self._replaced:
            return self._replaced[name].dtype
        stored = self._base.dtype(name)
        return torch.promote_types(stored, torch.float32) if name in self._adapters else stored

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        adapter, transposed = self._adapters.get(name), name in self._transposed
        if name in self._replaced:
            whole = self._replaced[name]
            return (whole if adapter is None else fold(whole, adapter, transposed=transposed))[start:stop]
        if adapter is None:
            return self._base.read(name, start, stop)
        if transposed and adapter.magnitude is not None:
            return fold(self._base.read(name), adapter, transposed=transposed)[start:stop]
        return fold(self._base.read(name, start, stop), adapter, start=start or 0, transposed=transposed)
