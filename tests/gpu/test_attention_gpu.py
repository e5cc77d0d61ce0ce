"""Attention and loss kernels on a GPU against their plain twins: what no CPU can test."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from tiny_models import hf_config
from xorl.core.models import spec_for
from xorl.core.nn import LayerKernels
from xorl.kernels.attention import ATTENTION, AttentionRequest, AttentionSpec, resolve_attention
from xorl.kernels.attention.kernel import Documents
from xorl.kernels.attention.native import _cudnn_length
from xorl.kernels.attention.reference import eager_attention
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.linear_ce import linear_cross_entropy
from xorl.kernels.testing import assert_matches_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

ON_GPU = torch.cuda.is_available()
PROBE = AttentionRequest("cuda", torch.bfloat16, head_dim=64, deterministic=False)
BACKENDS = [name for name in ATTENTION.names if name != "eager" and (not ON_GPU or name in ATTENTION.runnable(PROBE))]

RAGGED = [129, 1, 7, 300, 64, 11]
# Past 256 documents a library may look up a token's document in another way.
MANY = [1 + index % 5 for index in range(300)]
# On Hopper and later, rows that `native` gives to cuDNN.
EQUAL = [2048, 2048]
ONE = [4096]
SHAPES = [(6, 2, 64), (4, 4, 80), (8, 1, 128), (2, 2, 192), (2, 2, 256), (3, 3, 8)]


def make_inputs(lengths, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype):
    """Random q, k, v for a packed row, on the GPU; v is a slice of a wider tensor, as a merged projection gives."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), heads, head_dim, generator=generator).to("cuda", dtype)
        for heads in (num_heads, num_kv_heads, 2 * num_kv_heads)
    )
    return q, k, v[:, num_kv_heads:]


def resolve(backend: str, dtype: torch.dtype, head_dim: int, window: int | None, deterministic: bool = False):
    """The backend, or a skipped test with the reason that it gives for refusing this request."""
    try:
        return resolve_attention(backend, AttentionRequest("cuda", dtype, head_dim, window, deterministic))
    except RuntimeError as error:
        pytest.skip(str(error))


# A window of 1 has no gradients of queries and keys, so there is nothing that errors are relative to.
@pytest.mark.parametrize("window", [None, 2, 33])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_matches_the_plain_twin(backend, num_heads, num_kv_heads, head_dim, window, dtype):
    """Catches wrong outputs or gradients with grouped heads, odd lengths, each head_dim, or a window off by one."""
    attention = resolve(backend, dtype, head_dim, window)
    options = {"layout": SequenceLayout.from_lengths(RAGGED, "cuda"), "spec": AttentionSpec(head_dim**-0.5, window)}
    assert_matches_reference(
        lambda q, k, v: attention(q, k, v, **options),
        lambda q, k, v: eager_attention(q, k, v, **options),
        make_inputs(RAGGED, num_heads, num_kv_heads, head_dim, dtype),
    )


@pytest.mark.parametrize("lengths", [RAGGED, EQUAL], ids=["ragged", "equal"])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 64), (72, 72), (80, 80), (128, 128), (192, 128), (64, 96)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_to_later_tokens_and_values_of_another_width(backend, causal, head_dim, v_head_dim, lengths):
    """Catches a mask that stays or is missing in one pass, and channels of values that are cut at the wrong end."""
    request = AttentionRequest("cuda", torch.bfloat16, max(head_dim, v_head_dim), deterministic=False, causal=causal)
    try:
        attention = resolve_attention(backend, request)
    except RuntimeError as error:
        pytest.skip(str(error))
    options = {
        "layout": SequenceLayout.from_lengths(lengths, "cuda"),
        "spec": AttentionSpec(head_dim**-0.5, causal=causal),
    }
    q, k, _ = make_inputs(lengths, 4, 2, head_dim, torch.bfloat16)
    assert_matches_reference(
        lambda q, k, v: attention(q, k, v, **options),
        lambda q, k, v: eager_attention(q, k, v, **options),
        (q, k, make_inputs(lengths, 4, 2, v_head_dim, torch.bfloat16)[2]),
    )


@pytest.mark.parametrize("window", [None, 33, 500])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(8, 2, 128), (4, 4, 64), (6, 2, 80)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_at_the_end_of_documents_get_their_rows_of_the_whole(
    backend, dtype, num_heads, num_kv_heads, head_dim, window
):
    """Catches a causal mask from the first query and key on where a rank has the last queries of a document alone."""
    attention = resolve(backend, dtype, head_dim, window)
    lengths, num_queries = [1000, 300, 700], [130, 300, 1]
    q, k, v = make_inputs(lengths, num_heads, num_kv_heads, head_dim, dtype)
    rows = torch.cat([of[-n:] for of, n in zip(torch.arange(2000).split(lengths), num_queries, strict=True)]).cuda()
    keys, queries = (SequenceLayout.from_lengths(each, "cuda") for each in (lengths, num_queries))
    documents = [Documents(layout.cu_seqlens, layout.offsets) for layout in (queries, keys)]
    options = {"spec": AttentionSpec(head_dim**-0.5, window), "deterministic": False}

    def last_queries(q, k, v):
        out, lse = attention.forward(q[rows], k, v, *documents, **options)
        grads = attention.backward(torch.ones_like(out), q[rows], k, v, out, lse.contiguous(), *documents, **options)
        return out, *grads

    def whole(q, k, v):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = eager_attention(*leaves, keys, AttentionSpec(options["spec"].scale, window))[rows]
        grad_q, *others = torch.autograd.grad(out, leaves, torch.ones_like(out))
        return out.detach(), grad_q[rows], *others

    found, wanted = last_queries(q, k, v), whole(*(x.double() for x in (q, k, v)))
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine - theirs).norm() <= bound * theirs.norm()


@pytest.mark.parametrize("lengths", [MANY, EQUAL, ONE, [128] * 7], ids=["many", "equal", "one", "short"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_matches_the_plain_twin_in_each_kind_of_row(backend, window, lengths):
    """Catches a kernel for rows of one length, of one document or of very many that is wrong where others are right."""
    attention = resolve(backend, torch.bfloat16, 128, window)
    options = {"layout": SequenceLayout.from_lengths(lengths, "cuda"), "spec": AttentionSpec(128**-0.5, window)}
    assert_matches_reference(
        lambda q, k, v: attention(q, k, v, **options),
        lambda q, k, v: eager_attention(q, k, v, **options),
        make_inputs(lengths, 4, 2, 128, torch.bfloat16),
    )


@pytest.mark.parametrize("lengths", [RAGGED, EQUAL], ids=["ragged", "equal"])
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("backend", BACKENDS)
def test_log_sum_exp_and_its_gradient(backend, window, lengths):
    """Catches a log-sum-exp in base 2, transposed or of unscaled scores, and a gradient that leaves it out."""
    attention = resolve(backend, torch.bfloat16, 64, window)
    options = {"layout": SequenceLayout.from_lengths(lengths, "cuda"), "spec": AttentionSpec(0.125, window)}
    inputs = make_inputs(lengths, 4, 2, 64, torch.bfloat16)
    _, lse = attention.with_lse(*inputs, **options)
    _, wanted = eager_attention.with_lse(*(x.double() for x in inputs), **options)
    assert (lse.dtype, lse.shape) == (torch.float32, (sum(lengths), 4))
    torch.testing.assert_close(lse.double(), wanted, rtol=1e-3, atol=1e-3)
    assert_matches_reference(
        lambda q, k, v: attention.with_lse(q, k, v, **options),
        lambda q, k, v: eager_attention.with_lse(q, k, v, **options),
        inputs,
    )


@pytest.mark.parametrize("lengths", [[2048] * 3, [300, 64, 437, 1]], ids=["equal", "ragged"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_document_is_bitwise_alone_in_its_pack(backend, window, lengths):
    """Catches a kernel in which neighbours in the pack change one bit of a document."""
    attention = resolve(backend, torch.bfloat16, 64, window)
    before = make_inputs(lengths, 4, 2, 64, torch.bfloat16)
    after = [x.clone() for x in before]
    changed = slice(lengths[0], lengths[0] + lengths[1])
    for x in after:
        x[changed] = torch.randn_like(x[changed]) * 10
    options = {"layout": SequenceLayout.from_lengths(lengths, "cuda"), "spec": AttentionSpec(0.125, window)}
    results = [attention.with_lse(*inputs, **options) for inputs in (before, after)]
    for out_before, out_after in zip(*results, strict=True):
        assert not torch.equal(out_before[changed], out_after[changed])
        out_after[changed] = out_before[changed]
        assert torch.equal(out_before, out_after)


@pytest.mark.parametrize("lengths", [[500, 1, 700], EQUAL], ids=["ragged", "equal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("backend", BACKENDS)
def test_deterministic_gradients_are_the_same_bits(deterministic, backend, window, head_dim, lengths):
    """Catches gradients that are summed in the order in which thread blocks happen to finish."""
    attention = resolve(backend, torch.bfloat16, head_dim, window, deterministic=True)
    options = {"layout": SequenceLayout.from_lengths(lengths, "cuda"), "spec": AttentionSpec(0.1, window)}
    results = []
    for _ in range(4):
        inputs = [x.detach().requires_grad_() for x in make_inputs(lengths, 8, 2, head_dim, torch.bfloat16)]
        out = attention(*inputs, **options)
        results.append((out, *torch.autograd.grad(out, inputs, torch.ones_like(out))))
    for result in results[1:]:
        assert all(torch.equal(got, first) for got, first in zip(result, results[0], strict=True))


class Layer(nn.Module):
    """A merged projection, attention and a residual connection, as in a decoder layer."""

    def __init__(self, attention, window: int | None) -> None:
        super().__init__()
        self.attention = attention
        self.window = window
        self.qkv = nn.Linear(256, 8 * 64)
        self.out = nn.Linear(4 * 64, 256)

    def forward(self, x, layout):
        q, k, v = (y.unflatten(-1, (-1, 64)) for y in self.qkv(x).split([256, 128, 128], dim=-1))
        return x + self.out(self.attention(q, k, v, layout, AttentionSpec(0.125, self.window)).flatten(-2))


@pytest.mark.parametrize("marked", [True, False], ids=["marked dynamic", "not marked"])
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_compiles_once_for_all_rows(backend, window, marked):
    """Catches a graph break, a guard on the documents, or compiled code that gives a kernel other strides."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = Layer(resolve(backend, torch.bfloat16, 64, window), window).to("cuda", torch.bfloat16)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer.forward, fullgraph=True, backend=counter)
    for lengths in ([500, 12], [256, 256], [500, 8, 4], [600], RAGGED, MANY, EQUAL, [2, 1]):
        layout = SequenceLayout.from_lengths(lengths, "cuda")
        x = torch.randn(sum(lengths), 256, device="cuda", dtype=torch.bfloat16)
        results = []
        for forward in (compiled, layer):
            leaf = x.clone().requires_grad_()
            if marked:
                layout.mark_dynamic()
                torch._dynamo.maybe_mark_dynamic(leaf, 0)
            out = forward(leaf, layout)
            results.append((out, *torch.autograd.grad(out.square().mean(), (leaf, *layer.parameters()))))
        for got, wanted in zip(*results, strict=True):
            assert (got - wanted).norm() <= 2e-2 * wanted.norm()
    assert counter.frame_count <= (1 if marked else 3)


def test_rows_of_one_length_go_to_cudnn_on_hopper():
    """Catches a fast path that is never taken, or that is taken where it cannot run."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("cuDNN is used from compute capability 9.0")
    q, k, v = make_inputs(EQUAL, 4, 2, 128, torch.bfloat16)
    layouts = (SequenceLayout.from_lengths(lengths) for lengths in (EQUAL, [2048, 1920, 128]))
    equal, uneven = (Documents(layout.cu_seqlens, layout.offsets) for layout in layouts)
    assert _cudnn_length(q, k, v, equal, AttentionSpec(0.1), False) == 2048
    assert _cudnn_length(q, k, v, equal, AttentionSpec(0.1), True) is None
    assert _cudnn_length(q, k, v, equal, AttentionSpec(0.1, 100), False) is None
    assert _cudnn_length(q, k, v, uneven, AttentionSpec(0.1), False) is None


def test_auto_is_the_first_that_runs():
    """Catches a default that is slow where it need not be, or that fails in fp32."""
    order = ("flash_attention_4", "flash_attention_3", "native", "sdpa")
    for dtype, head_dim in ((torch.bfloat16, 64), (torch.float32, 64), (torch.bfloat16, 20)):
        request = AttentionRequest("cuda", dtype, head_dim)
        first = next(name for name in order if name in ATTENTION.runnable(request))
        assert resolve_attention("auto", request) is resolve_attention(first, request)
        assert (first == "sdpa") == (dtype == torch.float32 or head_dim == 20)


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


@pytest.mark.parametrize("on_gpu", BACKENDS)
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_decoder_trains_alike_on_the_gpu_and_on_the_cpu(family, on_gpu):
    """Catches a layer that is right on the CPU alone: loss and gradient in bf16 against fp32 on the CPU."""
    sizes = {
        "qwen3": {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "max_position_embeddings": 512},
        "gpt2": {"n_embd": 128, "n_head": 2, "n_positions": 512},
    }[family]
    values = hf_config(family, vocab_size=500, initializer_range=0.02, **sizes)
    spec = spec_for(values)
    config = spec.config_from_hf(values)
    ids = torch.randint(500, (sum(RAGGED),), generator=torch.Generator().manual_seed(0))
    results = []
    for device, dtype, backend in (("cpu", torch.float32, "eager"), ("cuda", torch.bfloat16, on_gpu)):
        attention = resolve_attention(backend, AttentionRequest(device, dtype, config.layers[0].attention.head_dim))
        with torch.device("meta"):
            decoder = spec.build(config, merge_qkv=True, kernels=LayerKernels(attention=attention))
        decoder.to_empty(device=device)
        decoder.init_weights(seed=0)
        decoder.compute_dtype = dtype
        layout, row = SequenceLayout.from_lengths(RAGGED, device=device), ids.to(device)
        loss = decoder(row, layout, lambda h, w, row=row: linear_cross_entropy(h, w, row.roll(-1))[0].mean())
        loss.backward()
        results.append((loss.detach().cpu(), [parameter.grad.cpu() for parameter in decoder.parameters()]))
    (wanted_loss, wanted), (got_loss, got) = results
    torch.testing.assert_close(got_loss, wanted_loss, rtol=2e-3, atol=0)
    for gradient, reference in zip(got, wanted, strict=True):
        assert (gradient - reference).norm() <= 3e-2 * reference.norm()


@pytest.mark.parametrize("kind", ["equal", "ragged", "one"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_more_than_two_to_the_31_elements(backend, kind, require_memory):
    # Catches offsets in 32 bits: at 2.7e9 elements of q, FlashAttention 2 and cuDNN return NaN and wrong gradients.
    require_memory(70)
    num_heads, num_kv_heads, head_dim = 128, 8, 128
    lengths = {"equal": [4096] * 36, "ragged": [4000, 4096, *[4096] * 34, 4192], "one": [147_456]}[kind]
    if kind == "one" and backend == "flash_attention_4":
        pytest.skip("its own offsets are tested by the documents")
    attention = resolve(backend, torch.bfloat16, head_dim, None)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad_out = (
        torch.randn(sum(lengths), heads, head_dim, generator=generator, device="cuda", dtype=torch.bfloat16)
        for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    )
    layout = SequenceLayout.from_lengths(lengths, "cuda")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attention(*leaves, layout, AttentionSpec(0.1)).backward(grad_out)
    found = [leaf.grad for leaf in leaves]
    if kind == "one":  # some heads of it alone
        cuts = [(slice(None), group) for group in (0, num_kv_heads - 1)]
    else:
        cuts = [(slice(0, lengths[0]), None), (slice(sum(lengths[:-1]), None), None)]
    for rows, group in cuts:
        groups = slice(None) if group is None else slice(group, group + 1)
        ratio = num_heads // num_kv_heads
        heads = slice(None) if group is None else slice(group * ratio, (group + 1) * ratio)
        alone = [
            x.detach()[rows, cut].contiguous().requires_grad_() for x, cut in ((q, heads), (k, groups), (v, groups))
        ]
        length = len(alone[0])
        out = attention(*alone, SequenceLayout.from_lengths([length], "cuda"), AttentionSpec(0.1))
        out.backward(grad_out[rows, heads].contiguous())
        for name, whole, cut, leaf in zip("qkv", found, (heads, groups, groups), alone, strict=True):
            wanted = leaf.grad.float()
            error = (whole[rows, cut].float() - wanted).norm() / wanted.norm()
            assert error < 1e-2, (name, rows, error.item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sdpa_takes_a_window_without_a_mask_and_without_a_wait(dtype):
    # Catches a mask of all pairs of tokens, 2 GiB here, and copies from pageable memory for each new row.
    attention = resolve("sdpa", dtype, 64, 128)
    for lengths in ([256, 256, 40, 40], [32_768, 300, 300, 32_768]):
        q, k, v = (x.requires_grad_() for x in make_inputs(lengths, 4, 2, 64, dtype))
        layout = SequenceLayout.from_lengths(lengths, "cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("default" if lengths[0] == 256 else "error")
        try:
            attention(q, k, v, layout, AttentionSpec(0.1, 128)).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.max_memory_allocated() - before < 2**30
