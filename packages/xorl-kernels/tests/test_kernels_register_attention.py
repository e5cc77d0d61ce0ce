"""Attention functions of a user's own, by name."""

import pytest
import torch
from torch import Tensor

from xorl.kernels.attention import ATTENTION, AttentionRequest, register_attention, resolve_attention
from xorl.kernels.layout import SequenceLayout

REQUEST = AttentionRequest("cpu", torch.float32, 8)


def simple(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, *, scale: float, window: int | None) -> Tensor:
    parts = zip(*(x.split(layout.lengths) for x in (q, k, v)), strict=True)
    outputs = []
    for q_part, k_part, v_part in parts:
        heads = [x.transpose(0, 1) for x in (q_part, k_part, v_part)]
        out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=True)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


def test_a_plain_function_is_a_backend(monkeypatch) -> None:
    # Catches a registration that needs private parts of the registry, and a wrapper that changes the result.
    monkeypatch.setattr(ATTENTION, "_backends", dict(ATTENTION._backends))
    register_attention("simple", simple, refusal=lambda request: None if request.window is None else "no windows")
    q, k, v = torch.randn(7, 4, 8, requires_grad=True), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    layout = SequenceLayout.from_lengths([4, 3])
    out = resolve_attention("simple", REQUEST)(q, k, v, layout, scale=0.5, window=None)
    expected = resolve_attention("eager", REQUEST)(q, k, v, layout, scale=0.5, window=None)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one.square().sum(), q) for one in (out, expected)))
    with pytest.raises(RuntimeError, match="no windows"):
        resolve_attention("simple", AttentionRequest("cpu", torch.float32, 8, window=2))
    with pytest.raises(RuntimeError, match="returns no log-sum-exp"):
        resolve_attention("simple", REQUEST).with_lse(q, k, v, layout, scale=0.5, window=None)
    with pytest.raises(ValueError, match="the 7 tokens of the layout"):
        resolve_attention("simple", REQUEST)(q[:6], k, v, layout, scale=0.5, window=None)
    for taken in ("simple", "sdpa", "auto"):
        with pytest.raises(ValueError, match=f"name: there is already the attention backend '{taken}'"):
            register_attention(taken, simple)


def test_a_function_that_returns_another_shape_is_refused(monkeypatch) -> None:
    # Catches an output that later layers would read as something else.
    monkeypatch.setattr(ATTENTION, "_backends", dict(ATTENTION._backends))
    register_attention("wrong", lambda q, k, v, layout, *, scale, window: q[:, :2])
    q = torch.randn(4, 4, 8)
    with pytest.raises(ValueError, match=r"function: wrong must return \[4, 4, 8\]"):
        resolve_attention("wrong", REQUEST)(q, q, q, SequenceLayout.from_lengths([4]), scale=1.0, window=None)
