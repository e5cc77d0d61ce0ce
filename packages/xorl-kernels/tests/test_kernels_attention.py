"""Every attention backend that runs here against its plain twin, and the plain twin against the definition."""

import copy
import math

import pytest
import torch

from xorl.kernels.attention import ATTENTION, AttentionRequest, AttentionSpec, resolve_attention
from xorl.kernels.attention.kernel import Documents, visible_pairs
from xorl.kernels.attention.reference import causal_mask, eager_attention, eager_backward, eager_forward
from xorl.kernels.attention.split import split_by_heads
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.testing import assert_matches_reference

LENGTHS = [33, 1, 7, 64, 2]
BACKENDS = ATTENTION.runnable(AttentionRequest("cpu", torch.float32, head_dim=64))


def make_inputs(lengths, num_heads, num_kv_heads, head_dim, dtype):
    """Random q, k, v for a packed row."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(lengths)
    return tuple(
        torch.randn(num_tokens, heads, head_dim, generator=generator, dtype=torch.float64).to(dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )


def attend_by_definition(q, k, v, lengths, scale, window):
    """Token by token and head by head, as in the contract's words."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    first = 0
    for length in lengths:
        for i in range(length):
            begin = max(0, i + 1 - window) if window else 0
            for head in range(q.shape[1]):
                keys = [k[first + j, head // group] for j in range(begin, i + 1)]
                values = [v[first + j, head // group] for j in range(begin, i + 1)]
                scores = [math.exp(scale * float(q[first + i, head] @ key)) for key in keys]
                out[first + i, head] = sum(s * value for s, value in zip(scores, values, strict=True)) / sum(scores)
        first += length
    return out


@pytest.mark.parametrize("window", [None, 1, 3])
def test_eager_is_the_definition(window):
    """Catches a plain twin that is wrong: a window off by one, heads that read the wrong key, a leak at a border."""
    lengths = [5, 1, 3]
    q, k, v = make_inputs(lengths, 4, 2, 8, torch.float64)
    got = eager_attention(q, k, v, SequenceLayout.from_lengths(lengths), AttentionSpec(0.3, window))
    torch.testing.assert_close(got, attend_by_definition(q, k, v, lengths, 0.3, window), rtol=0, atol=1e-12)


def test_the_gradient_of_eager_is_that_of_its_values():
    """Catches a hand-written derivative that is wrong: every other backend's gradients are compared with this one's."""
    lengths = [4, 1, 3]
    layout = SequenceLayout.from_lengths(lengths)
    inputs = [x.requires_grad_() for x in make_inputs(lengths, 4, 2, 3, torch.float64)]
    for window in (None, 2):
        torch.autograd.gradcheck(
            lambda *qkv, window=window: eager_attention.with_lse(*qkv, layout, AttentionSpec(0.5, window)), inputs
        )


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_log_sum_exp_and_its_gradient(backend, window):
    """Catches another base, layout or scale of the log-sum-exp, and a gradient that leaves it out.

    Attention over a ring of ranks merges its parts by it.
    """
    lengths = [5, 1, 9]
    layout, group = SequenceLayout.from_lengths(lengths), 2

    def by_definition(q, k, v):
        out, lses = attention.with_lse(q, k, v, layout, AttentionSpec(0.3, window)), []
        for q_doc, k_doc in zip(q.split(lengths), k.split(lengths), strict=True):
            scores = 0.3 * torch.einsum("qhc,khc->qhk", q_doc, k_doc.repeat_interleave(group, dim=1))
            distance = torch.arange(len(q_doc))[:, None] - torch.arange(len(q_doc))
            hidden = (distance < 0) | (distance >= (window or len(q_doc)))
            lses.append(scores.masked_fill(hidden[:, None], float("-inf")).logsumexp(dim=-1))
        return out[0], torch.cat(lses)

    attention = resolve_attention(backend, AttentionRequest("cpu", torch.float32, 8, window))
    for dtype in (torch.float32, torch.float64):
        inputs = make_inputs(lengths, 4, 2, 8, dtype)
        assert attention.with_lse(*inputs, layout, AttentionSpec(0.3, window))[1].dtype == dtype
        assert_matches_reference(
            lambda q, k, v: attention.with_lse(q, k, v, layout, AttentionSpec(0.3, window)), by_definition, inputs
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 64), (3, 3, 80), (4, 1, 128), (2, 2, 20)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_matches_the_plain_twin(backend, num_heads, num_kv_heads, head_dim, window, dtype):
    """Catches wrong outputs or gradients at odd lengths, with grouped heads, with a window, in each precision."""
    layout = SequenceLayout.from_lengths(LENGTHS)
    options = {"layout": layout, "spec": AttentionSpec(head_dim**-0.5, window)}
    attention = resolve_attention(backend, AttentionRequest("cpu", dtype, head_dim, window))
    assert_matches_reference(
        lambda q, k, v: attention(q, k, v, **options),
        lambda q, k, v: eager_attention(q, k, v, **options),
        make_inputs(LENGTHS, num_heads, num_kv_heads, head_dim, dtype),
    )


def attend_in_torch(q, k, v, *, causal, softcap):
    """The formula for each document, in fp64, in operations that autograd differentiates."""
    outs = []
    for q_doc, k_doc, v_doc in zip(q.split(LENGTHS), k.split(LENGTHS), v.split(LENGTHS), strict=True):
        k_doc, v_doc = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k_doc, v_doc))
        scores = 0.2 * torch.einsum("qhc,khc->hqk", q_doc, k_doc)
        scores = scores if softcap is None else softcap * (scores / softcap).tanh()
        if causal:
            scores = scores.masked_fill(torch.ones(len(q_doc), len(q_doc)).triu(1).bool(), float("-inf"))
        outs.append(torch.einsum("hqk,khv->qhv", scores.softmax(-1), v_doc))
    return torch.cat(outs)


@pytest.mark.parametrize(("backend", "softcap"), [*((name, None) for name in BACKENDS), ("eager", 1.5)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(24, 16), (16, 24), (20, 20)])
def test_values_of_another_width_and_attention_to_later_tokens(backend, softcap, causal, head_dim, v_head_dim):
    """Catches values cut or padded at the wrong end, a mask that stays, and one that is missing in a backward pass."""
    q, k, _ = make_inputs(LENGTHS, 4, 2, head_dim, torch.float32)
    inputs = q, k, make_inputs(LENGTHS, 4, 2, v_head_dim, torch.float32)[2]
    layout = SequenceLayout.from_lengths(LENGTHS)
    request = AttentionRequest("cpu", torch.float32, max(head_dim, v_head_dim), softcap=softcap, causal=causal)
    attention, spec = resolve_attention(backend, request), AttentionSpec(0.2, softcap=softcap, causal=causal)
    assert attention(*inputs, layout, spec).shape == (sum(LENGTHS), 4, v_head_dim)
    assert_matches_reference(
        lambda q, k, v: attention(q, k, v, layout, spec),
        lambda q, k, v: attend_in_torch(q, k, v, causal=causal, softcap=softcap),
        inputs,
    )


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_document_is_bitwise_alone_in_its_pack(backend, window):
    """Catches attention across a document border, however faint: neighbours may not change one bit."""
    attention = resolve_attention(backend, AttentionRequest("cpu", torch.float32, 16, window))
    layout = SequenceLayout.from_lengths(LENGTHS)
    before = make_inputs(LENGTHS, 4, 2, 16, torch.float32)
    after = [x.clone() for x in before]
    changed = slice(34, 41)  # the third document
    for x in after:
        x[changed] = torch.randn_like(x[changed]) * 100
    options = {"layout": layout, "spec": AttentionSpec(0.25, window)}
    out_before, out_after = attention(*before, **options), attention(*after, **options)
    assert not torch.equal(out_before[changed], out_after[changed])
    out_after[changed] = out_before[changed]
    assert torch.equal(out_before, out_after)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pack_is_its_documents_one_by_one(backend):
    """Catches a backend that treats one document differently from several."""
    attention = resolve_attention(backend, AttentionRequest("cpu", torch.float32, 16))
    q, k, v = make_inputs(LENGTHS, 4, 2, 16, torch.float32)
    packed = attention(q, k, v, SequenceLayout.from_lengths(LENGTHS), AttentionSpec(0.25))
    alone = [
        attention(*parts, SequenceLayout.from_lengths([length]), AttentionSpec(0.25))
        for length, *parts in zip(LENGTHS, q.split(LENGTHS), k.split(LENGTHS), v.split(LENGTHS), strict=True)
    ]
    assert torch.equal(packed, torch.cat(alone))


def test_a_copied_model_calls_the_same_operators():
    """Catches a model that cannot be copied because an operator cannot."""
    assert copy.deepcopy({"attention": eager_attention})["attention"] is eager_attention


@pytest.mark.parametrize("window", [None, 1, 4, 64])
def test_the_pairs_that_count_as_work_are_those_that_see_each_other(window):
    """Catches operation counts, and with them MFU and TFLOP/s, over masked pairs or across documents."""
    counted = sum(int(causal_mask(length, length, window, torch.device("cpu")).sum()) for length in LENGTHS)
    offsets = SequenceLayout.from_lengths(LENGTHS).offsets
    assert visible_pairs(offsets, None, causal=False) == sum(length**2 for length in LENGTHS)
    assert visible_pairs(SequenceLayout.from_lengths(LENGTHS).offsets, window) == counted


@pytest.mark.parametrize("window", [None, 3, 8, 64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_at_the_end_of_documents_get_their_rows_of_the_whole(backend, window):
    """Catches a causal mask from the first query and key on where a rank has the last queries of a document alone."""
    attention = resolve_attention(backend, AttentionRequest("cpu", torch.float32, 16))
    lengths, num_queries = [7, 12, 5], [7, 4, 1]
    q, k, v = make_inputs(lengths, 4, 2, 16, torch.float32)
    q_rows = torch.cat([rows[-n:] for rows, n in zip(torch.arange(24).split(lengths), num_queries, strict=True)])
    keys, queries = (SequenceLayout.from_lengths(each) for each in (lengths, num_queries))
    documents = [Documents(layout.cu_seqlens, layout.offsets) for layout in (queries, keys)]
    options = {"spec": AttentionSpec(0.25, window), "deterministic": False}
    out, lse = attention.forward(q[q_rows], k, v, *documents, **options)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    whole, whole_lse = eager_attention.with_lse(*leaves, keys, AttentionSpec(0.25, window))
    torch.testing.assert_close(out, whole[q_rows])
    torch.testing.assert_close(lse.t(), whole_lse[q_rows])
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    wanted = torch.autograd.grad(whole[q_rows], leaves, grad)
    with torch.no_grad():
        found = attention.backward(grad, q[q_rows], k, v, out, lse.contiguous(), *documents, **options)
    torch.testing.assert_close(found[0], wanted[0][q_rows])
    torch.testing.assert_close(found[1:], wanted[1:])
    pairs = sum(
        int(causal_mask(n, m, window, torch.device("cpu")).sum()) for n, m in zip(num_queries, lengths, strict=True)
    )
    assert visible_pairs(queries.offsets, window, keys.offsets) == pairs


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_give_no_outputs(backend):
    """Catches a crash on the empty row of a rank that holds nothing."""
    attention = resolve_attention(backend, AttentionRequest("cpu", torch.float32, 16))
    q, k, v = make_inputs([], 4, 2, 16, torch.float32)
    assert attention(q, k, v, SequenceLayout.from_lengths([]), AttentionSpec(0.25)).shape == (0, 4, 16)


@pytest.mark.parametrize("heads_at_once", [1, 2, 3, 5])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (4, 4), (4, 1)])
def test_a_backward_pass_split_by_heads_is_the_whole_one(num_heads, num_kv_heads, heads_at_once, monkeypatch):
    """Catches heads that are paired with the keys of another group, and shares of a group's gradient that are lost."""
    lengths = [5, 1, 9]
    layout = SequenceLayout.from_lengths(lengths)
    q, k, v = make_inputs(lengths, num_heads, num_kv_heads, 16, torch.float32)
    grad_out = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    options = {"spec": AttentionSpec(0.3, None), "deterministic": False}
    row = (Documents(layout.cu_seqlens, layout.offsets),) * 2
    out, lse = eager_forward(q, k, v, *row, **options)
    wanted = eager_backward(grad_out, q, k, v, out, lse, *row, **options)
    monkeypatch.setattr("xorl.kernels.attention.split.MAX_ELEMENTS", sum(lengths) * 16 * heads_at_once)
    calls = []

    def counted(*tensors, **given):
        calls.append(tensors[1].shape[1])
        return eager_backward(*tensors, **given)

    found = split_by_heads(counted)(grad_out, q, k, v, out, lse, *row, **options)
    assert max(calls) <= heads_at_once
    assert sum(calls) == num_heads
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_a_mask_that_would_take_all_memory_is_refused():
    """Catches a window on a CPU that silently takes 4 bytes for each pair of tokens."""
    q, k, v = make_inputs([40_000], 1, 1, 8, torch.float32)
    attention = resolve_attention("sdpa", AttentionRequest("cpu", torch.float32, 8, 16, False))
    with pytest.raises(
        ValueError, match=r"a window of 16 tokens in a document of 40000 tokens needs a mask of 6\.0 GiB"
    ):
        attention(q, k, v, SequenceLayout.from_lengths([40_000]), AttentionSpec(1.0, 16))
