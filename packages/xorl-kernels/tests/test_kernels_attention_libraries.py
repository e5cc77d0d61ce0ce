"""The adapters to the FlashAttention libraries, over stand-ins that keep each library's conventions and run anywhere.

The libraries need a GPU; their own results are compared in tests/gpu. What these tests see is the adapter: which
argument goes where, how a window is counted, how the log-sum-exp lies.
"""

import sys
from functools import cache
from importlib import import_module
from types import ModuleType

import pytest
import torch

from xorl.kernels.attention import AttentionSpec
from xorl.kernels.attention.kernel import Documents
from xorl.kernels.attention.reference import eager_attention, eager_backward, eager_forward
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.testing import assert_matches_reference

LENGTHS = [5, 1, 9]
CALLS = []


def attend(
    q, k, v, cu_seqlens_q, cu_seqlens_k, longest, scale, causal, left, right, softcap, deterministic=None, backward=None
):
    """Attention as all three libraries define it: with `left` keys before the query, or all, and `right` after it."""
    assert cu_seqlens_q is cu_seqlens_k
    assert cu_seqlens_q.dtype == torch.int32
    assert longest == max(LENGTHS)
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    assert (left is None or left < 0) == (right is None or right < 0)
    window = None if left is None or left < 0 else left + 1
    assert window is None or right == 0
    CALLS.append((window, deterministic))
    spec = AttentionSpec(scale, window, softcap or None, causal or window is not None)
    options = {"spec": spec, "deterministic": False}
    documents = Documents(cu_seqlens_q, cu_seqlens_q.long())
    if backward is None:
        return eager_forward(q, k, v, documents, documents, **options)
    grad_out, out, lse = backward
    assert grad_out.stride(-1) == 1
    assert lse.shape == (q.shape[1], q.shape[0])
    assert lse.is_contiguous()
    return eager_backward(grad_out, q, k, v, out, lse, documents, documents, **options)


def flash_4():
    """flash-attn-4: returns more than output and log-sum-exp, allocates the gradients itself."""

    def fwd(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
            softmax_scale=None, causal=False, window_size_left=None, window_size_right=None, softcap=None,
            return_lse=False):  # fmt: skip
        assert return_lse
        assert not (causal and window_size_left is not None)
        row = q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale
        shared = *row, causal, window_size_left, window_size_right
        return *attend(*shared, softcap), None, None, None

    def bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
            window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
            deterministic=False):  # fmt: skip
        row = q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale
        shared = *row, causal, window_size_left, window_size_right
        return attend(*shared, softcap, deterministic, backward=(dout, out, lse))

    return {"flash_attn.cute.interface": {"_flash_attn_fwd": fwd, "_flash_attn_bwd": bwd}}


def flash_2():
    """flash-attn 2.8: writes the gradients into tensors it is given."""

    def forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
                block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False):  # fmt: skip
        assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
        row = q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale
        shared = *row, causal, window_size_left, window_size_right
        return *attend(*shared, softcap), torch.empty(0), torch.empty(2)

    def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                 dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
                 deterministic, rng_state=None, zero_tensors=False):  # fmt: skip
        assert (dropout_p, alibi_slopes) == (0.0, None)
        row = q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale
        shared = *row, causal, window_size_left, window_size_right
        gradients = attend(*shared, softcap, deterministic, backward=(dout, out, softmax_lse))
        for into, gradient in zip((dq, dk, dv), gradients, strict=True):
            into.copy_(gradient)
        return torch.empty(0)

    names = {"_flash_attn_varlen_forward": forward, "_flash_attn_varlen_backward": backward}
    return {"flash_attn.flash_attn_interface": names}


# The operators as the oldest version declares them: everything before the first default has to be given.
FLASH_3_FORWARD = """fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor? out,
    Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k,
    int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k,
    Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale,
    Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left = -1, int window_size_right = -1,
    int attention_chunk = 0, float softcap = 0.0, bool is_rotary_interleaved = False,
    Tensor? scheduler_metadata = None, int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0)
    -> (Tensor, Tensor, Tensor, Tensor)"""
FLASH_3_BACKWARD = """bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,
    Tensor(dq!)? dq, Tensor(dk!)? dk, Tensor(dv!)? dv, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q,
    Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, float softmax_scale, bool is_causal,
    int window_size_left = -1, int window_size_right = -1, float softcap = 0.0, bool deterministic = False,
    int sm_margin = 0) -> Tensor"""


@cache
def flash_3():
    """flash_attn_3: operators that its extension registers, once in each process: torch keeps what it found."""

    # Arguments at their default are left out by the dispatcher.
    def forward(q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
                max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin,
                seqlens_rotary, q_descale, k_descale, v_descale, softmax_scale, is_causal, window_size_left=-1,
                window_size_right=-1, attention_chunk=0, softcap=0.0, is_rotary_interleaved=False,
                scheduler_metadata=None, num_splits=0):  # fmt: skip
        assert num_splits == 1
        row = q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale
        shared = *row, is_causal, window_size_left, window_size_right
        return *attend(*shared, softcap), q.new_empty(0), q.new_empty(0)

    def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
                 max_seqlen_q, max_seqlen_k, softmax_scale, is_causal, window_size_left=-1, window_size_right=-1,
                 softcap=0.0, deterministic=False):  # fmt: skip
        row = q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale
        shared = *row, is_causal, window_size_left, window_size_right
        gradients = attend(*shared, softcap, deterministic, backward=(dout, out, softmax_lse))
        for into, gradient in zip((dq, dk, dv), gradients, strict=True):
            into.copy_(gradient)
        return q.new_empty(0)

    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(" ".join(FLASH_3_FORWARD.split()))
    library.define(" ".join(FLASH_3_BACKWARD.split()))
    library.impl("fwd", forward, "CompositeExplicitAutograd")
    library.impl("bwd", backward, "CompositeExplicitAutograd")
    return {"flash_attn_3._C": {"library": library}}


LIBRARIES = {
    "flash_attention_2": ("flash2", flash_2),
    "flash_attention_3": ("flash3", flash_3),
    "flash_attention_4": ("flash4", flash_4),
}


@pytest.fixture(scope="module", params=LIBRARIES)
def attention(request):
    """The adapter of one library, imported over its stand-in."""
    module, library = LIBRARIES[request.param]
    with pytest.MonkeyPatch.context() as patch:
        for name, contents in library().items():
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                patch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
            vars(sys.modules[name]).update(contents)
        yield getattr(import_module(f"xorl.kernels.attention.{module}"), request.param)


@pytest.mark.parametrize(("window", "causal"), [(None, True), (1, True), (4, True), (None, False)])
def test_an_adapter_gives_its_library_what_it_asks_for(attention, window, causal):
    """Catches a window off by one, a mask that is not asked for, a log-sum-exp transposed, or one argument in another's
    place, in either pass."""
    layout = SequenceLayout.from_lengths(LENGTHS)
    generator = torch.Generator().manual_seed(0)
    # Values that are a slice of a projection, as those of a merged one are.
    qkv = torch.randn(sum(LENGTHS), 4 + 2 + 2, 8, generator=generator, dtype=torch.float32)
    options = {"layout": layout, "spec": AttentionSpec(0.3, window, causal=causal)}
    assert_matches_reference(
        lambda x: attention.with_lse(*x.split([4, 2, 2], dim=1), **options),
        lambda x: eager_attention.with_lse(*x.split([4, 2, 2], dim=1), **options),
        (qkv,),
    )


@pytest.mark.parametrize("window", [None, 4])
def test_an_adapter_caps_scores_and_adds_sinks(attention, window):
    """Catches a cap that one pass does not tell the library, and sinks whose correction another kernel does not fit."""
    layout, spec = SequenceLayout.from_lengths(LENGTHS), AttentionSpec(0.3, window, softcap=0.5)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(LENGTHS), heads, 8, generator=generator) for heads in (4, 2, 2))
    assert_matches_reference(
        lambda q, k, v, sinks: attention(q, k, v, layout, spec, sinks),
        lambda q, k, v, sinks: eager_attention(q, k, v, layout, spec, sinks),
        (q, k, v, torch.linspace(-1, 2, 4)),
    )


def test_an_adapter_asks_for_determinism_when_torch_does(attention):
    """Catches full determinism that is switched on and never reaches the library."""
    q, k, v = torch.randn(3, sum(LENGTHS), 2, 8).requires_grad_()
    layout = SequenceLayout.from_lengths(LENGTHS)
    for wanted in (True, False):
        CALLS.clear()
        torch.use_deterministic_algorithms(wanted)
        try:
            attention(q, k, v, layout, AttentionSpec(0.3)).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
        assert CALLS[-1] == (None, wanted)
