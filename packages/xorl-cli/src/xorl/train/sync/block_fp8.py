"""Quantises weights before sending, to the fp8 format of inference servers: E4M3 in square blocks with a scale each."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from torch import Tensor

from xorl.ckpt.layout import TensorRecord
from xorl.ckpt.tensor_file import TensorGroup
from xorl.kernels.quant.block_fp8 import quantize_block_fp8

BLOCK_SIZE = 128  # rows and columns; the only size that inference engines have kernels for


def in_block_fp8(groups: Sequence[TensorGroup], modules: Collection[str]) -> list[TensorGroup]:
    """Convert the weight [O, I] of each of `modules` to `weight` in E4M3 and `weight_scale_inv` in fp32.

    The scales are [ceil(O / 128), ceil(I / 128)], and a weight is code * scale (arXiv:2412.19437, section 3.3.2). This
    is the format of Hugging Face checkpoints with `quant_method` fp8. Values are quantised from the dtype of their
    group.
    """
    weights = {f"{module}.weight" for module in modules}
    return [_quantized(group, [name for name in group.records if name in weights]) for group in groups]


def _quantized(group: TensorGroup, weights: Sequence[str]) -> TensorGroup:
    if not weights:
        return group
    records = dict(group.records)
    for name in weights:
        shape = records[name].shape
        records[name] = TensorRecord(shape, "float8_e4m3fn")
        records[_scale_of(name)] = TensorRecord(tuple(math.ceil(size / BLOCK_SIZE) for size in shape), "float32")
    return TensorGroup(records, partial(_make, group, weights))


def _make(group: TensorGroup, weights: Sequence[str]) -> Mapping[str, Tensor]:
    tensors = dict(group.make())
    for name in weights:
        # On ranks other than 0, a group may be empty.
        if name in tensors:
            tensors[name], tensors[_scale_of(name)] = quantize_block_fp8(tensors[name], BLOCK_SIZE)
    return tensors


def _scale_of(name: str) -> str:
    return f"{name}_scale_inv"
