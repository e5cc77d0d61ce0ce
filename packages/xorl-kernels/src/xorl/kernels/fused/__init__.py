"""Fused kernels, each with a plain twin in torch. Importing this needs no Triton; the kernels' own modules do."""

from xorl.kernels.fused.device import triton_refusal
from xorl.kernels.fused.reference import HeadNorms, HeadShape, RopeTables

__all__ = ["HeadNorms", "HeadShape", "RopeTables", "triton_refusal"]
