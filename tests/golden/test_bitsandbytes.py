"""nf4 against bitsandbytes, on the same weights: its codes, its scales, and what it makes of them."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from xorl.kernels.quant import dequantize_nf4, quantize_nf4

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="there is no bitsandbytes for this platform"
)


def test_codes_scales_and_values_are_those_of_bitsandbytes() -> None:
    # Catches a table, a rounding, an order of nibbles or of groups that another tool would read as other weights.
    # It takes seconds to import, and nothing else here needs it.
    from bitsandbytes import functional as bnb  # noqa: PLC0415

    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for group_size in (64, 128):
            normal, spread = torch.randn(2, 384, 1024, generator=generator)
            weight = (0.02 * normal * spread.exp()).to(dtype)
            weight[5, :128] = 0.0
            codes, state = bnb.quantize_4bit(weight, blocksize=group_size, quant_type="nf4", compress_statistics=False)
            ours, absmax = quantize_nf4(weight, group_size)
            assert torch.equal(ours.flatten(), codes.flatten())
            assert torch.equal(absmax.flatten(), state.absmax)
            wanted = bnb.dequantize_4bit(codes, state)
            assert torch.equal(dequantize_nf4(ours, absmax, dtype), wanted)
