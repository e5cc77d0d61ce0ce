"""Wrong arguments at public doors: each is refused and named."""

import pytest
import torch

from xorl.kernels.attention import AttentionRequest, resolve_attention
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.quant import QuantScheme


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("q", "k", "window", "message"),
    [
        ((60, 4, 8), (60, 2, 8), None, "must have the 48 tokens of the layout; got q .60"),
        ((48, 4, 8), (47, 2, 8), None, "the 48 tokens of the layout"),
        ((48, 4, 8), (48, 3, 8), None, "query heads must be a multiple .* q .48, 4, 8., k .48, 3, 8."),
        ((48, 4, 8), (48, 2, 6), None, r"q must be \[T, H, C\], k and v \[T, G, C\]"),
        ((48, 32), (48, 16), None, r"q must be \[T, H, C\]"),
        ((48, 4, 8), (48, 2, 8), 0, "window must be an integer of at least 1, or None"),
    ],
)
def test_attention_refuses_shapes_that_do_not_fit(backend, q, k, window, message) -> None:
    # Catches uninitialised memory, rows that are left out, and heads that read the keys of others.
    attention = resolve_attention(backend, AttentionRequest("cpu", torch.float32, 8))
    query, key = torch.randn(q), torch.randn(k)
    with pytest.raises(ValueError, match=message):
        attention(query, key, key, SequenceLayout.from_lengths([40, 8]), scale=1.0, window=window)


def test_attention_refuses_keys_in_another_dtype() -> None:
    # Catches a cast that nobody asked for.
    attention = resolve_attention("eager", AttentionRequest("cpu", torch.float32, 8))
    q, k = torch.randn(4, 2, 8), torch.randn(4, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"same dtype, of floating point; got torch.float32, torch.bfloat16"):
        attention(q, k, k, SequenceLayout.from_lengths([4]), scale=1.0, window=None)


def test_unknown_names_and_lengths_are_refused() -> None:
    # Catches another format than the one that was meant, and a crash that names nothing.
    with pytest.raises(ValueError, match="quant_format: 'nf5' is not one of 'nf4', 'nvfp4', 'block_fp8'"):
        QuantScheme("nf5", 64)
    for quant_format, group_size in (("nvfp4", 64), ("nf4", 24), ("nf4", 2048), ("block_fp8", 512)):
        with pytest.raises(ValueError, match=f"group_size: {group_size} is not a valid .* {quant_format}; use"):
            QuantScheme(quant_format, group_size)
    with pytest.raises(ValueError, match=r"at least one token, got lengths \(3, -1\)"):
        SequenceLayout.from_lengths([3, -1])
