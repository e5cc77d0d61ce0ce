"""Recorded experts in the model's own terms: checked, without dense layers; and back for clients, with all layers.

Shapes: n tokens of a datum, R rows, L layers with experts, K experts per token, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xorl.core.models import DecoderConfig
from xorl.core.models.decoder_config import ExpertsConfig
from xorl.server.datum import Array

NO_RECORD = -1


@dataclass(frozen=True)
class RoutedLayers:
    """The layers of a model that route tokens.

    num_layers: of the whole model. layers: the indices of the L layers with experts.
    """

    num_layers: int
    layers: tuple[int, ...]
    num_experts: int
    num_active: int

    @classmethod
    def of(cls, config: DecoderConfig) -> RoutedLayers | None:
        """None for a model without experts."""
        mixtures = {i: layer.ffn for i, layer in enumerate(config.layers) if isinstance(layer.ffn, ExpertsConfig)}
        if not mixtures:
            return None
        ffn = next(iter(mixtures.values()))
        return cls(config.num_layers, tuple(mixtures), ffn.num_experts, ffn.num_active)

    def read(self, record: Array, num_tokens: int) -> NDArray[np.int16]:
        """A client's record as int16 [n, L, K], NO_RECORD for a token without one. Raises ValueError if it is invalid.

        record: [n or n - 1, layers, K], of all layers or of those with experts; or flat.
        """
        values = self._of_layers(self._shaped(record.numpy(), num_tokens))
        outside = values[(values < 0) | (values >= self.num_experts)]
        if outside.size:
            raise ValueError(f"there is no expert {outside[0]}: the model has experts 0 to {self.num_experts - 1}")
        if self.num_active > 1:
            empty = np.flatnonzero(~values.any(axis=(0, 2))) if len(values) else []
            if len(empty):
                raise ValueError(f"layer {self.layers[empty[0]]} is 0 for all tokens: it was not recorded")
            ordered = np.sort(values, axis=-1)
            rows, layers, _ = np.nonzero(ordered[..., 1:] == ordered[..., :-1])
            if len(rows):
                raise ValueError(
                    f"token {rows[0]} has an expert twice in layer {self.layers[layers[0]]}: "
                    f"{values[rows[0], layers[0]].tolist()}; a token's experts must be different"
                )
        routes = np.full((num_tokens, *values.shape[1:]), NO_RECORD, np.int16)
        routes[: len(values)] = values
        return routes

    def _shaped(self, values: NDArray[np.generic], num_tokens: int) -> NDArray[np.generic]:
        """[R, layers, K] with valid R and K."""
        rows = (num_tokens, num_tokens - 1)
        if values.ndim == 1:
            shapes = {(count, layers) for count in rows for layers in (self.num_layers, len(self.layers))}
            fitting = [shape for shape in shapes if shape[0] * shape[1] * self.num_active == values.size]
            if len(fitting) != 1:
                raise ValueError(
                    f"{values.size} values fit {len(fitting)} shapes of a record of {num_tokens} tokens: send them "
                    f"with their shape, [{num_tokens} or {num_tokens - 1}, layers, {self.num_active}]"
                )
            return values.reshape(*fitting[0], self.num_active)
        if values.shape[0] not in rows or values.shape[2] != self.num_active:
            raise ValueError(
                f"the shape is {list(values.shape)}, but must be [{num_tokens}, layers, {self.num_active}] for "
                f"{num_tokens} tokens, or [{num_tokens - 1}, ..] without the last one"
            )
        return values

    def _of_layers(self, values: NDArray[np.generic]) -> NDArray[np.int16]:
        """[R, L, K], without dense layers."""
        if values.shape[1] == len(self.layers):
            return values.astype(np.int16)
        if values.shape[1] == self.num_layers:
            return values[:, list(self.layers)].astype(np.int16)
        raise ValueError(
            f"it has {values.shape[1]} layers, but must have all {self.num_layers} of the model, or the "
            f"{len(self.layers)} with experts"
        )

    def of_all_layers(self, routes: NDArray[np.generic], dtype: type[np.int16 | np.int32]) -> Array:
        """Experts [R, L, K] as [R, layers, K] in `dtype`, 0 in dense layers."""
        values = np.zeros((len(routes), self.num_layers, self.num_active), dtype)
        values[:, list(self.layers)] = routes
        return Array.of(values)
