"""Fused kernels, each with a plain twin in torch. Only the modules of the kernels themselves import Triton."""

from xorl.kernels.fused.arguments import HeadNorms, HeadShape, RopeTables
from xorl.kernels.fused.device import triton_refusal

__all__ = ["HeadNorms", "HeadShape", "RopeTables", "triton_refusal"]
