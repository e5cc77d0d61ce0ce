"""Caps on scores, and sinks, against attention as its definition has it."""

import pytest
import torch

from xorl.kernels.attention import ATTENTION, AttentionRequest, AttentionSpec, decode_refusal, resolve_attention
from xorl.kernels.attention.reference import causal_mask, eager_attention
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.testing import assert_matches_reference

LENGTHS = [5, 1, 7]
LAYOUT = SequenceLayout.from_lengths(LENGTHS)
BACKENDS = ATTENTION.runnable(AttentionRequest("cpu", torch.float32, head_dim=8, sinks=True))


def make_inputs(dtype, *, has_sinks=True):
    """q, k and v of grouped heads, and sinks."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(LENGTHS), heads, 8, generator=generator) for heads in (4, 2, 2))
    sinks = (torch.linspace(-2, 3, 4).to(dtype),) if has_sinks else ()
    return q.to(dtype), k.to(dtype), v.to(dtype), *sinks


def defined(q, k, v, sinks, spec):
    """The definition: a softmax over scores and sink, whose last weight has no value."""
    outputs = []
    for q_doc, k_doc, v_doc in zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True):
        keys, values = (x.repeat_interleave(2, dim=1) for x in (k_doc, v_doc))
        scores = spec.scale * torch.einsum("qhc,khc->hqk", q_doc, keys)
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        scores = scores.masked_fill(~causal_mask(len(q_doc), len(q_doc), spec.window, q.device), float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q_doc), 1)), dim=-1)
        outputs.append(torch.einsum("hqk,khc->qhc", scores.softmax(dim=-1)[..., : len(q_doc)], values))
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_of_every_backend(backend, window, dtype):
    """Catches sinks that are dropped, scaled or of another head, and a correction that the backward pass lacks."""
    attention, spec = resolve_attention(backend, AttentionRequest("cpu", dtype, 8, window)), AttentionSpec(0.3, window)
    assert_matches_reference(
        lambda q, k, v, sinks: attention(q, k, v, LAYOUT, spec, sinks),
        lambda q, k, v, sinks: defined(q, k, v, sinks, spec),
        make_inputs(dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_capped_scores(window, has_sinks, dtype):
    """Catches a cap after the mask or before the scale, and a backward pass that forgets its derivative."""
    spec = AttentionSpec(0.3, window, softcap=0.5)
    assert_matches_reference(
        lambda q, k, v, *sinks: eager_attention(q, k, v, LAYOUT, spec, *sinks),
        lambda q, k, v, *sinks: defined(q, k, v, sinks[0] if sinks else None, spec),
        make_inputs(dtype, has_sinks=has_sinks),
    )


def test_backends_without_a_cap_refuse_it():
    """Catches a cap that is ignored, and a refusal that does not say which option and what else works."""
    request = AttentionRequest("cpu", torch.float32, 8, softcap=50.0)
    refused = r"'sdpa' cannot run here: it does not cap scores, .* at 50; these can: eager"
    with pytest.raises(RuntimeError, match=refused):
        resolve_attention("sdpa", request)
    assert resolve_attention("auto", request) is eager_attention
    assert decode_refusal(request) == "it does not cap scores, and the model caps them at 50"
    inputs = [x.requires_grad_() for x in make_inputs(torch.float64)[:3]]
    _, lse = eager_attention.with_lse(*inputs, LAYOUT, AttentionSpec(0.3, softcap=5.0))
    with pytest.raises(RuntimeError, match="log-sum-exp of capped scores is not differentiable"):
        lse.sum().backward()
