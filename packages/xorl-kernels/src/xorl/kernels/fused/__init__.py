"""Fused kernels, each beside a plain twin in torch. Importing this needs no Triton; the kernels' own modules do."""

from xorl.kernels.fused.device import triton_refusal

__all__ = ["triton_refusal"]
