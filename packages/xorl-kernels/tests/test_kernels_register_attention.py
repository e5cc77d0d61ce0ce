"""Attention functions of a user's own, by name."""

import pytest
import torch
from torch import Tensor

from xorl.kernels.attention import (
    ATTENTION,
    AttentionRequest,
    AttentionSpec,
    PackedAttention,
    operator,
    register_attention,
    resolve_attention,
)
from xorl.kernels.layout import SequenceLayout

REQUEST = AttentionRequest("cpu", torch.float32, 8)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(ATTENTION, "_backends", dict(ATTENTION._backends))


def simple(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, *, scale: float, window: int | None) -> Tensor:
    parts = zip(*(x.split(layout.lengths) for x in (q, k, v)), strict=True)
    outputs = []
    for q_part, k_part, v_part in parts:
        heads = [x.transpose(0, 1) for x in (q_part, k_part, v_part)]
        out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=True)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


def test_a_plain_function_is_a_backend() -> None:
    # Catches a registration that needs private parts of the registry, and a wrapper that changes the result.
    register_attention("simple", simple, refusal=lambda request: None if request.window is None else "no windows")
    q, k, v = torch.randn(7, 4, 8, requires_grad=True), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    layout = SequenceLayout.from_lengths([4, 3])
    out = resolve_attention("simple", REQUEST)(q, k, v, layout, AttentionSpec(0.5))
    expected = resolve_attention("eager", REQUEST)(q, k, v, layout, AttentionSpec(0.5))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one.square().sum(), q) for one in (out, expected)))
    with pytest.raises(RuntimeError, match="no windows"):
        resolve_attention("simple", AttentionRequest("cpu", torch.float32, 8, window=2))
    with pytest.raises(RuntimeError, match="returns no log-sum-exp"):
        resolve_attention("simple", REQUEST).with_lse(q, k, v, layout, AttentionSpec(0.5))
    with pytest.raises(ValueError, match="the 7 tokens of the layout"):
        resolve_attention("simple", REQUEST)(q[:6], k, v, layout, AttentionSpec(0.5))
    for taken in ("simple", "sdpa", "auto"):
        with pytest.raises(ValueError, match=f"name: there is already the attention backend '{taken}'"):
            register_attention(taken, simple)


@pytest.mark.parametrize(("returned", "said"), [(lambda q: q[:, :2], ""), (lambda q: None, ".*returned NoneType")])
def test_a_function_that_returns_something_else_is_refused(returned, said) -> None:
    # Catches an output that later layers would read as something else, and a forgotten `return`.
    register_attention("wrong", lambda q, k, v, layout, *, scale, window: returned(q))
    q = torch.randn(4, 4, 8)
    with pytest.raises(ValueError, match=rf"function: wrong must return \[4, 4, 8\]{said}"):
        resolve_attention("wrong", REQUEST)(q, q, q, SequenceLayout.from_lengths([4]), AttentionSpec(1.0))


@pytest.mark.parametrize(
    ("name", "function", "refusal", "message"),
    [
        ("mine", "simple", None, r"function must be a function \(q, k, v, layout, \*, scale, window\); got 'simple'"),
        (None, simple, None, "name must be the attention backend's name, a non-empty string; got None"),
        (simple, "mine", None, "function must be a function .*; got 'mine'"),
        ("mine", lambda q, k, v: q, None, r"function must take \(q, .*; it takes \(q, k, v\): "),
        ("mine", lambda q, k, v, layout, scale: q, None, "function must take .*window"),
        ("mine", simple, "no windows", r"refusal must be a function \(request\); got 'no windows'"),
        ("mine", simple, lambda: None, r"refusal must take \(request\); it takes \(\)"),
    ],
)
def test_registration_refuses_what_cannot_be_called(name, function, refusal, message) -> None:
    # Catches a mistake that would show in the middle of training, with an error that does not name it.
    with pytest.raises(ValueError, match=message):
        register_attention(name, function, refusal=(lambda request: None) if refusal is None else refusal)
    assert name not in ATTENTION.names


def fail(request: AttentionRequest) -> str | None:
    raise KeyError(request.head_dim)


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        (lambda request: False, "its refusal function returned False, which is neither a reason"),
        (lambda request: True, "its refusal function returned True"),
        (fail, "its refusal function raised KeyError: 8"),
    ],
)
def test_a_broken_refusal_does_not_break_other_backends(refusal, message) -> None:
    # Catches a backend that breaks the error messages of all others.
    register_attention("broken", simple, refusal=refusal)
    with pytest.raises(RuntimeError, match=f"'broken' cannot run here: {message}.*these can: eager, sdpa"):
        resolve_attention("broken", REQUEST)
    with pytest.raises(RuntimeError, match=r"these can: eager, sdpa$"):
        resolve_attention("native", REQUEST)


def test_modules_with_attention_functions_are_pickled(tmp_path) -> None:
    # Catches torch.save of a model that fails on the operators of its attention, and a copy with operators of its own.
    register_attention("simple", simple)
    module = torch.nn.Module()
    module.attention, module.own = resolve_attention("sdpa", REQUEST), resolve_attention("simple", REQUEST)
    torch.save(module, tmp_path / "module.pt")
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    assert loaded.attention is module.attention
    assert loaded.own.function is simple
    with pytest.raises(RuntimeError, match="attention 'unknown' is not defined in this process; create its Packed"):
        operator._defined("unknown", "xorl.kernels.attention.sdpa")


@pytest.mark.parametrize(
    ("name", "kernel", "message"),
    [
        ("sdpa", print, "name: there is already a PackedAttention 'sdpa'"),
        ("my attention", print, "name must be an identifier"),
        ("mine", None, "forward and backward must be functions"),
    ],
)
def test_packed_attention_refuses_what_it_cannot_define(name, kernel, message) -> None:
    # Catches operators that take the place of the built-in ones.
    with pytest.raises(ValueError, match=message):
        PackedAttention(name, kernel, kernel)
