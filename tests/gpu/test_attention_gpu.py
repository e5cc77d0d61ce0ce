"""Attention and loss kernels on a GPU against their plain twins: what no CPU can test."""

import pytest
import torch
from torch.nn import functional as F

from xorl.core.models import SPECS
from xorl.core.nn import LayerKernels
from xorl.kernels.attention import AttentionRequest, eager_attention, resolve_attention
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.linear_ce import linear_cross_entropy
from xorl.kernels.testing import assert_matches_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

LENGTHS = [129, 1, 7, 300, 64, 11]
HALF = (torch.bfloat16, torch.float16)
SHAPES = [(6, 2, 64), (4, 4, 80), (8, 1, 128), (2, 2, 256), (3, 3, 8)]


def make_inputs(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Random q, k, v for a packed row, on the GPU."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(sum(LENGTHS), heads, head_dim, generator=generator).to("cuda", dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )


@pytest.mark.parametrize("window", [None, 2, 33])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [*(("native", dtype) for dtype in HALF), *(("sdpa", dtype) for dtype in (*HALF, torch.float32))],
    ids=str,
)
def test_backend_matches_the_plain_twin(backend, num_heads, num_kv_heads, head_dim, window, dtype):
    """Catches wrong outputs or gradients with grouped heads, odd lengths, each head_dim, or a window off by one."""
    layout = SequenceLayout.from_lengths(LENGTHS, device="cuda")
    options = {"layout": layout, "scale": head_dim**-0.5, "window": window}
    attention = resolve_attention(backend, AttentionRequest("cuda", dtype, head_dim, window))
    assert_matches_reference(
        lambda q, k, v: attention(q, k, v, **options),
        lambda q, k, v: eager_attention(q, k, v, **options),
        make_inputs(num_heads, num_kv_heads, head_dim, dtype),
    )


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("backend", ["native", "sdpa"])
def test_a_document_is_bitwise_alone_in_its_pack(backend, window):
    """Catches a kernel in which neighbours in the pack change one bit of a document."""
    attention = resolve_attention(backend, AttentionRequest("cuda", torch.bfloat16, 64, window))
    layout = SequenceLayout.from_lengths(LENGTHS, device="cuda")
    before = make_inputs(4, 2, 64, torch.bfloat16)
    after = [x.clone() for x in before]
    changed = slice(137, 437)  # the fourth document
    for x in after:
        x[changed] = torch.randn_like(x[changed]) * 10
    options = {"layout": layout, "scale": 0.125, "window": window}
    out_before, out_after = attention(*before, **options), attention(*after, **options)
    assert not torch.equal(out_before[changed], out_after[changed])
    out_after[changed] = out_before[changed]
    assert torch.equal(out_before, out_after)


def test_auto_is_native_in_half_precision_and_sdpa_otherwise():
    """Catches a default that is slow where it need not be, or that fails in fp32."""
    native = resolve_attention("native", AttentionRequest("cuda", torch.bfloat16, 64))
    assert resolve_attention("auto", AttentionRequest("cuda", torch.bfloat16, 64)) is native
    sdpa = resolve_attention("sdpa", AttentionRequest("cuda", torch.float32, 64))
    assert resolve_attention("auto", AttentionRequest("cuda", torch.float32, 64)) is sdpa
    assert resolve_attention("auto", AttentionRequest("cuda", torch.bfloat16, 20)) is sdpa


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linear_cross_entropy_matches_full_logits(dtype):
    """Catches the fp32-output matrix product that exists on CUDA alone going wrong, at odd sizes."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(137, 72, generator=generator).to("cuda", dtype)
    weight = torch.randn(1003, 72, generator=generator).to("cuda", dtype)
    labels = torch.randint(1003, (137,), generator=generator).cuda()
    labels[::5] = -100

    def full_logits(hidden, weight, labels):
        loss = F.cross_entropy(hidden @ weight.t(), labels, reduction="none")
        return loss, -loss

    assert_matches_reference(
        lambda *inputs: linear_cross_entropy(*inputs, chunk_tokens=50), full_logits, (hidden, weight, labels)
    )


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "GPT2LMHeadModel"])
def test_a_decoder_trains_alike_on_native_attention_and_on_the_cpu(architecture):
    """Catches a layer that is right on the CPU alone: loss and gradient in bf16 against fp32 on the CPU."""
    hf_config = {
        "Qwen3ForCausalLM": {
            "vocab_size": 500,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 512,
        },
        "GPT2LMHeadModel": {"vocab_size": 500, "n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 512},
    }[architecture]
    spec = SPECS[architecture]
    config = spec.config_from_hf(hf_config)
    ids = torch.randint(500, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    results = []
    for device, dtype, backend in (("cpu", torch.float32, "eager"), ("cuda", torch.bfloat16, "native")):
        attention = resolve_attention(backend, AttentionRequest(device, dtype, config.head_dim))
        with torch.device("meta"):
            decoder = spec.build(config, merge_qkv=True, kernels=LayerKernels(attention=attention))
        decoder.to_empty(device=device)
        decoder.init_weights(seed=0)
        decoder.compute_dtype = dtype
        layout, row = SequenceLayout.from_lengths(LENGTHS, device=device), ids.to(device)
        loss = decoder(row, layout, lambda h, w, row=row: linear_cross_entropy(h, w, row.roll(-1))[0].mean())
        loss.backward()
        results.append((loss.detach().cpu(), [parameter.grad.cpu() for parameter in decoder.parameters()]))
    (wanted_loss, wanted), (got_loss, got) = results
    torch.testing.assert_close(got_loss, wanted_loss, rtol=2e-3, atol=0)
    for gradient, reference in zip(got, wanted, strict=True):
        assert (gradient - reference).norm() <= 3e-2 * reference.norm()
