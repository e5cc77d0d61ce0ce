"""Reads stacks of experts that are stored as MXFP4: 4-bit E2M1 codes, and a power of two for each 32 of them.

OCP Microscaling Formats 1.0. A weight is code * 2^(scale - 127), which bf16 holds exactly.

Shapes: E experts, O outputs and I inputs of a projection.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

import torch
from torch import Tensor

from xorl.core.models.recipes import WeightSource
from xorl.core.models.stacks import ExpertNames, is_stack

BLOCKS, SCALES = "_blocks", "_scales"
# The exponent bias of scales.
BIAS = 127
# Indexed by the lower three bits of a code; the highest bit is the sign.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4Source:
    """A `WeightSource` in which stacks are bf16 tensors [E, O, I], or [E, I, O] for a family that transposes them.

    Files have `NAME_blocks` [E, O, I / 32, 16], two codes a byte, the lower bits first, and `NAME_scales`
    [E, O, I / 32], instead of NAME.
    """

    def __init__(self, source: WeightSource, names: ExpertNames) -> None:
        self._source = source
        self._is_transposed = names.stack is not None and names.stack.is_transposed
        present = set(source.names())
        stacks = {name.removesuffix(BLOCKS) for name in present if name.endswith(BLOCKS)}
        self._stacks = {name for name in stacks if is_stack(name, names) and f"{name}{SCALES}" in present}
        stored = {f"{name}{suffix}" for name in self._stacks for suffix in (BLOCKS, SCALES)}
        self._names = (present - stored) | self._stacks

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._stacks:
            return self._source.shape(name)
        num_experts, num_outputs, num_blocks, num_bytes = self._source.shape(f"{name}{BLOCKS}")
        sizes = num_outputs, 2 * num_blocks * num_bytes
        return (num_experts, *(sizes[::-1] if self._is_transposed else sizes))

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16 if name in self._stacks else self._source.dtype(name)

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        if name not in self._stacks:
            return self._source.read(name, start, stop)
        blocks, scales = (self._source.read(f"{name}{suffix}", start, stop) for suffix in (BLOCKS, SCALES))
        weight = dequantized(blocks, scales)
        return weight.transpose(1, 2) if self._is_transposed else weight


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """[.., O, I] in bf16 of codes [.., O, I / 32, 16] and scales [.., O, I / 32], both in uint8."""
    # Each byte gives two values, which are read as one int32.
    pairs = _pairs().index_select(0, blocks.flatten().int()).view(torch.bfloat16)
    powers = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - BIAS).to(torch.bfloat16)
    return pairs.view(*scales.shape, -1).mul_(powers[..., None]).flatten(-2)


@cache
def _pairs() -> Tensor:
    """For each byte, its two values in bf16, as an int32."""
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], dtype=torch.bfloat16)
    codes = torch.arange(256)
    return torch.stack([values[codes % 16], values[codes // 16]], dim=1).view(torch.int32).flatten()
