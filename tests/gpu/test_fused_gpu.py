"""Fused kernels on a GPU against their plain twins, in the dtypes and at the sizes that no interpreter can test."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional as F

from tiny_models import hf_config
from xorl.core.loss import get_loss
from xorl.core.models import spec_for
from xorl.core.nn import LayerKernels
from xorl.core.nn.kernels import FUSED_KERNELS, choose_kernels
from xorl.kernels import vocabulary
from xorl.kernels.attention import AttentionRequest, resolve_attention
from xorl.kernels.fused import HeadNorms, HeadShape, heads, heads_triton, partial, reference, rms_norm
from xorl.kernels.head import HeadWeight, LogitOptions
from xorl.kernels.layout import RankGroup, SequenceLayout
from xorl.kernels.linear_ce import linear_cross_entropy, linear_cross_entropy_scores, linear_cross_entropy_sum
from xorl.kernels.testing import TOLERANCES, Tolerance, assert_close, assert_matches_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def randn(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def make_head(num_tokens, width, vocab_size, dtype, weight_dtype):
    """Random hidden states, head weight and labels; every fifth label is -100."""
    labels = torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(2))
    labels[::5] = -100
    hidden, weight = randn(num_tokens, width, dtype=dtype), randn(vocab_size, width, dtype=dtype, seed=1)
    return hidden, weight.to(weight_dtype), labels.cuda()


def full_logits(hidden, weight, labels):
    return F.cross_entropy(hidden @ weight.t(), labels, reduction="none")


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [*((dtype, dtype) for dtype in (*DTYPES, torch.float64)), (torch.bfloat16, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize(("num_tokens", "width", "vocab_size", "chunk"), [(137, 72, 1003, 50), (300, 64, 9001, None)])
def test_linear_cross_entropy(num_tokens, width, vocab_size, chunk, dtype, weight_dtype):
    # Catches products with fp32 results, which only CUDA has, in-place accumulation, and rows of odd length.
    inputs = make_head(num_tokens, width, vocab_size, dtype, weight_dtype)
    token_weight = torch.linspace(-1, 2, num_tokens, device="cuda")
    tolerance = TOLERANCES[dtype] if dtype != torch.float32 else Tolerance(worst=1e-4, mean=1e-4)
    assert_matches_reference(
        lambda *leaves: linear_cross_entropy(*leaves, chunk_tokens=chunk)[0], full_logits, inputs, tolerance=tolerance
    )
    assert_matches_reference(
        lambda *leaves: linear_cross_entropy_sum(*leaves, token_weight=token_weight, chunk_tokens=chunk)[0],
        lambda *leaves: (full_logits(*leaves) * token_weight).sum(),
        inputs,
        tolerance=tolerance,
    )


class Threads:
    """Ranks that are threads of this process, in place of a group's `all_gather`."""

    def __init__(self, size):
        self._barrier, self._sent, self._rank = threading.Barrier(size, timeout=60), [None] * size, threading.local()

    def gather(self, x, size, name):
        self._sent[self._rank.value] = x
        self._barrier.wait()
        gathered = torch.cat(self._sent)
        self._barrier.wait()
        return gathered

    def run(self, function):
        """The results of `function(rank)` of each rank."""

        def of_rank(rank):
            self._rank.value = rank
            return function(rank)

        with ThreadPoolExecutor(len(self._sent)) as pool:
            return list(pool.map(of_rank, range(len(self._sent))))


@pytest.mark.parametrize(("dtype", "weight_dtype"), [(dtype, dtype) for dtype in DTYPES], ids=str)
@pytest.mark.parametrize(("num_tokens", "width", "vocab_size", "chunk"), [(137, 72, 1003, 50), (300, 64, 9001, None)])
def test_a_vocabulary_of_three_ranks(num_tokens, width, vocab_size, chunk, dtype, weight_dtype, monkeypatch):
    # Catches a label of another rank that is read as one's own, and a scale of one rank's logits alone.
    hidden, weight, labels = make_head(num_tokens, width, vocab_size, dtype, weight_dtype)
    labels[:3] = torch.tensor([0, vocab_size - 1, -(-vocab_size // 3)])
    token_weight = torch.linspace(-1, 2, num_tokens, device="cuda")
    ranks = Threads(3)
    monkeypatch.setattr(vocabulary, "all_gather", ranks.gather)

    def of_rank(rank):
        vocab = vocabulary.Vocabulary(vocab_size, RankGroup(rank, 3, ""))
        own = hidden.clone().requires_grad_(), weight[vocab.held.start : vocab.held.stop].clone().requires_grad_()
        head = HeadWeight(own[1], LogitOptions(vocab=vocab))
        total, losses = linear_cross_entropy_sum(own[0], head, labels, token_weight=token_weight, chunk_tokens=chunk)
        return total, losses, *(torch.autograd.grad(total, own)), linear_cross_entropy_scores(own[0], head, labels)

    by_rank = ranks.run(of_rank)
    exact = hidden.double().requires_grad_(), weight.double().requires_grad_()
    wanted = F.cross_entropy(exact[0] @ exact[1].t(), labels, reduction="none")
    to_hidden, to_weight = torch.autograd.grad((wanted * token_weight).sum(), exact)
    tolerance = TOLERANCES[dtype] if dtype != torch.float32 else Tolerance(worst=1e-4, mean=1e-4)
    _, correct = linear_cross_entropy_scores(hidden, weight, labels)
    for total, losses, _, _, (scored, is_correct) in by_rank:
        assert_close("loss", losses, wanted.detach(), tolerance)
        assert_close("score", scored, wanted.detach(), tolerance)
        assert torch.equal(is_correct, correct)
        assert torch.equal(total, by_rank[0][0])
    assert_close("gradient of hidden", sum(one[2].double() for one in by_rank), to_hidden, tolerance)
    assert_close("gradient of weight", torch.cat([one[3] for one in by_rank]).double(), to_weight, tolerance)


def test_scores_and_rounded_logits():
    # Catches a row kernel that reads a bf16 row as another, and a choice that is not the argmax.
    hidden, weight, labels = make_head(300, 64, 9001, torch.bfloat16, torch.bfloat16)
    logits = (hidden @ weight.t()).float()
    labels[:50] = logits[:50].argmax(-1)
    loss, correct = linear_cross_entropy_scores(hidden, HeadWeight(weight, LogitOptions(fp32=False)), labels)
    assert_close("loss", loss, F.cross_entropy(logits, labels, reduction="none"), TOLERANCES[torch.float32])
    assert int(correct[:50].sum()) >= 45  # bf16 logits tie
    assert not correct[50::5].any()


def test_linear_cross_entropy_needs_less_than_a_gibibyte_and_never_waits():
    # Catches logits that are all held at once, a second copy of the weight's gradient, and a wait for the device.
    hidden, weight, labels = make_head(8192, 4096, 151_936, torch.bfloat16, torch.bfloat16)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    linear_cross_entropy_sum(hidden[:256], weight[:1024], labels[:256] % 1024)[0].backward()  # compiles, sets up
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_cross_entropy_sum(hidden, weight, labels)[0].backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    gradients = sum(leaf.grad.nbytes for leaf in leaves)
    assert torch.cuda.max_memory_allocated() - before - gradients < 2**30


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_policy_loss_needs_less_than_a_gibibyte_and_never_waits(is_frozen):
    # Catches logits that are kept for the backward pass, gradients copied to fp32, and a wait for the device.
    hidden, weight, labels = make_head(8192, 4096, 151_936, torch.bfloat16, torch.bfloat16)
    hidden, weight = (hidden / 64).requires_grad_(), weight.requires_grad_(not is_frozen)
    targets = {
        "labels": labels,
        "logprobs": randn(8192, dtype=torch.float32, seed=3) - 12.5,
        "advantages": randn(8192, dtype=torch.float32, seed=4),
    }
    loss = get_loss("drgrpo", {"beta": 0.0, "ratio_type": "sequence"})
    layout = SequenceLayout.from_lengths([1024] * 8, "cuda")
    first = {name: values[:256] for name, values in targets.items()}
    loss(hidden[:256], weight, first, SequenceLayout.from_lengths([256], "cuda")).sum.backward()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = loss(hidden, weight, targets, layout)
        output.sum.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert output.metrics["valid_tokens:sum"] == (labels != -100).sum()
    gradients = hidden.grad.nbytes + (hidden.grad.nbytes if is_frozen else weight.grad.nbytes)
    assert torch.cuda.max_memory_allocated() - before - gradients < 2**30


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_cross_entropy_over_a_frozen_head(dtype):
    # Catches a gradient of each token that is rounded, or multiplied, otherwise than its twin's.
    hidden, weight, labels = make_head(300, 64, 9001, dtype, dtype)
    tolerance = TOLERANCES[dtype] if dtype != torch.float32 else Tolerance(worst=1e-4, mean=1e-4)
    assert_matches_reference(
        lambda states: linear_cross_entropy(states, weight, labels)[0],
        lambda states: full_logits(states, weight.double(), labels),
        (hidden,),
        tolerance=tolerance,
    )


def test_linear_cross_entropy_is_the_same_to_the_bit():
    # Catches sums whose order depends on which program comes first.
    results = []
    for _ in range(2):
        hidden, weight, labels = make_head(1000, 256, 9001, torch.bfloat16, torch.bfloat16)
        leaves = [hidden.requires_grad_(), weight.requires_grad_()]
        total, _ = linear_cross_entropy_sum(*leaves, labels, chunk_tokens=256)
        results.append((total.detach(), *torch.autograd.grad(total, leaves)))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("last", [0.0, 30.0, 60.0])
def test_the_row_kernel_matches_its_twin_in_bf16(last, in_place):
    # Catches a gradient that overwrites logits of the same row before they are read, one at the label that another
    # thread overwrites, and rows that are read once although their maximum is far from where they begin.
    from xorl.kernels.fused import cross_entropy  # noqa: PLC0415 - needs Triton

    labels = torch.randint(50_257, (64,), generator=torch.Generator().manual_seed(2)).cuda()
    logits = randn(64, 50_257, dtype=torch.bfloat16 if in_place else torch.float32)
    logits[::2, -1] += last
    wanted_gradient = torch.empty(64, 50_257, device="cuda", dtype=torch.float64)
    wanted, found = (reference.RowLosses.empty(64, dtype, logits.device) for dtype in (torch.float64, torch.float32))
    reference.cross_entropy_rows(logits.double(), labels, None, wanted_gradient, wanted)
    assert torch.equal(wanted.scale, torch.ones_like(wanted.scale))
    gradient = logits[:] if in_place else torch.empty_like(logits, dtype=torch.bfloat16)
    cross_entropy.cross_entropy_rows(logits, labels, None, gradient, found)
    assert_close("loss", found.loss, wanted.loss, TOLERANCES[torch.float32])
    product = gradient.double() * found.scale[:, None]
    for rows in (slice(0, None, 2), slice(1, None, 2)):
        assert_close("gradient", product[rows].bfloat16(), wanted_gradient[rows], TOLERANCES[torch.bfloat16])


def eps_inputs(*shapes, dtype):
    return tuple(randn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))


def tolerance_of(dtype):
    # On a GPU fp32 sums of thousands of terms and its fast exponential differ from fp64 a little more than on a CPU.
    return TOLERANCES[dtype] if dtype != torch.float32 else Tolerance(worst=5e-5, mean=5e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 8), (700, 1000), (8191, 4096), (3, 16_384)])
def test_rms_norm(num_rows, width, dtype):
    # Catches rows that share a program wrongly, widths that fill no block, and warps that do not fit a width.
    from xorl.kernels.fused import rms_norm  # noqa: PLC0415 - needs Triton

    x, residual, weight = eps_inputs((num_rows, width), (num_rows, width), (width,), dtype=dtype)
    assert_matches_reference(
        lambda x, weight: rms_norm.add_rms_norm(x, None, weight, 1e-6),
        lambda x, weight: reference.add_rms_norm(x, None, weight, 1e-6),
        (x, weight),
        tolerance=tolerance_of(dtype),
    )
    assert_matches_reference(
        lambda *leaves: rms_norm.add_rms_norm(*leaves, 1e-6),
        lambda *leaves: reference.add_rms_norm(*leaves, 1e-6),
        (x, residual, weight),
        tolerance=tolerance_of(dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize(("has_norms", "has_rope"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize(
    ("num_tokens", "shape"), [(1, (4, 1, 64)), (1111, (32, 8, 128)), (300, (14, 2, 80)), (77, (3, 3, 256))]
)
def test_split_heads(num_tokens, shape, has_norms, has_rope, merged, dtype):
    # Catches head counts and widths that are no powers of two, and gradients that arrive with strides of their own.
    from xorl.kernels.fused import heads  # noqa: PLC0415 - needs Triton

    shape = HeadShape(*shape)
    angles = randn(num_tokens, shape.head_dim // 2, dtype=torch.float32, seed=9)
    rope = (angles.cos(), angles.sin()) if has_rope else None
    projected = randn(num_tokens, sum(shape.row_counts), dtype=dtype)
    parts = (projected,) if merged else projected.split(shape.row_counts, dim=-1)
    weights = eps_inputs((shape.head_dim,), (shape.head_dim,), dtype=dtype) if has_norms else ()

    def run(function, *leaves):
        norms = HeadNorms(*leaves[len(parts) :], 1e-6) if has_norms else None
        return function(leaves[: len(parts)], shape, norms, rope)

    assert_matches_reference(
        lambda *leaves: run(heads.split_heads, *leaves),
        lambda *leaves: run(reference.split_heads, *leaves),
        (*parts, *weights),
        tolerance=tolerance_of(dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 8), (700, 1000), (4097, 12_288)])
def test_swiglu(num_rows, width, dtype):
    # Catches a last block that reads the other half, and offsets beyond 2^31 bytes.
    from xorl.kernels.fused import swiglu  # noqa: PLC0415 - needs Triton

    inputs = eps_inputs((num_rows, 2 * width), dtype=dtype)
    assert_matches_reference(swiglu.swiglu, reference.swiglu, inputs, tolerance=tolerance_of(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 8), (700, 1000), (1025, 3072)])
def test_swiglu_and_the_linear_layer_after_it(num_rows, width, dtype):
    # Catches a gradient of the weight made of what the layer did not compute with.
    from xorl.kernels.fused import swiglu  # noqa: PLC0415 - needs Triton

    inputs = eps_inputs((num_rows, 2 * width), (64, width), (64,), dtype=dtype)
    tolerance = Tolerance(worst=1e-4, mean=1e-4) if dtype == torch.float32 else tolerance_of(dtype)
    assert_matches_reference(swiglu.swiglu_linear, reference.swiglu_linear, inputs, tolerance=tolerance)


def decoder_with(kernels, config, *, compiled):
    spec = spec_for(config)
    decoder = spec.build(spec.config_from_hf(config), kernels=kernels).cuda()
    decoder.init_weights(seed=0)
    decoder.compute_dtype = torch.bfloat16
    if compiled:
        for layer in decoder.layers:
            layer.forward = torch.compile(layer.forward, fullgraph=True)
    return decoder


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_decoder_trains_alike_with_fused_kernels(family, compiled):
    # Catches kernels that are right alone and wrong in a layer, and operators that inductor lays out otherwise.
    sizes = {"vocab_size": 500, "hidden_size": 128, "intermediate_size": 272, "head_dim": 64}
    config = hf_config(family, **sizes, max_position_embeddings=512, initializer_range=0.02)
    lengths = [129, 1, 7, 300, 64, 11]
    ids = torch.randint(500, (sum(lengths),), generator=torch.Generator().manual_seed(0)).cuda()
    layout = SequenceLayout.from_lengths(lengths, device="cuda")
    attention = resolve_attention("native", AttentionRequest("cuda", torch.bfloat16, 64))
    fused = choose_kernels(
        attention, device_type="cuda", dtype=torch.bfloat16, compiled=compiled, native=(), cast_bf16=False
    )
    assert fused != LayerKernels(attention)
    results = []
    for kernels in (LayerKernels(attention), fused):
        decoder = decoder_with(kernels, config, compiled=compiled)
        total = decoder(ids, layout, lambda hidden, weight: linear_cross_entropy_sum(hidden, weight, ids.roll(-1))[0])
        total.backward()
        results.append((total.detach(), [parameter.grad for parameter in decoder.parameters()]))
    (wanted_total, wanted), (total, gradients) = results
    torch.testing.assert_close(total, wanted_total, rtol=2e-3, atol=0)
    for gradient, plain in zip(gradients, wanted, strict=True):
        assert (gradient - plain).norm() <= 3e-2 * plain.norm()


def test_native_forms_round_alike_in_compiled_layers():
    # Catches roundings that inductor leaves out, in any of a layer's plain forms.
    config = hf_config("qwen3", vocab_size=500, hidden_size=128, intermediate_size=272, head_dim=64)
    ids = torch.randint(500, (400,), generator=torch.Generator().manual_seed(0)).cuda()
    layout = SequenceLayout.from_lengths([129, 271], device="cuda")
    attention = resolve_attention("native", AttentionRequest("cuda", torch.bfloat16, 64))
    results = []
    for compiled in (False, True):
        kernels = choose_kernels(
            attention,
            device_type="cuda",
            dtype=torch.bfloat16,
            compiled=compiled,
            native=FUSED_KERNELS,
            cast_bf16=False,
        )
        decoder = decoder_with(kernels, config, compiled=compiled)
        results.append(decoder(ids, layout, lambda hidden, _: hidden))
    assert torch.equal(*results)


def test_kernels_repeat_to_the_bit():
    # Catches sums over tokens whose order depends on which program comes first.
    from xorl.kernels.fused import heads, rms_norm  # noqa: PLC0415 - needs Triton

    shape, angles = HeadShape(8, 2, 64), randn(5000, 32, dtype=torch.float32, seed=9)
    rope = (angles.cos(), angles.sin())
    x, residual, weight, q_weight, k_weight = eps_inputs(
        (5000, sum(shape.row_counts)), (5000, sum(shape.row_counts)), (sum(shape.row_counts),), (64,), (64,),
        dtype=torch.bfloat16,
    )  # fmt: skip
    leaves = [leaf.requires_grad_() for leaf in (x, residual, weight, q_weight, k_weight)]

    def gradients():
        summed, normed = rms_norm.add_rms_norm(x, residual, weight, 1e-6)
        q, k, v = heads.split_heads((normed,), shape, HeadNorms(q_weight, k_weight, 1e-6), rope)
        return torch.autograd.grad([q, k, v, summed], leaves, [q.detach(), k.detach(), v.detach(), summed.detach()])

    assert all(torch.equal(*pair) for pair in zip(gradients(), gradients(), strict=True))


def test_the_gradient_of_each_row_sums_to_zero():
    # Catches a label's element that is rounded relative to an arbitrary total: it is as large as all others together.
    hidden, weight, labels = make_head(1024, 512, 32_000, torch.bfloat16, torch.float32)
    hidden, labels = hidden.detach(), torch.where(labels < 0, 5, labels)
    leaf = (weight.detach() * 0.1).requires_grad_()
    linear_cross_entropy_sum(hidden, leaf, labels)[0].backward()
    # Over the vocabulary, the weight's gradient sums to the hidden states times the sums of their rows.
    assert leaf.grad.double().sum(dim=0).norm() < 2e-4 * hidden.double().norm()


def test_new_lengths_compile_nothing():
    # Catches numbers of rows that are constants of a kernel: each new length of a pack would wait for the compiler.
    def count() -> int:
        kernels = (rms_norm._backward, partial._sum, heads_triton.backward)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    def run(num_tokens: int) -> None:
        x, weight = (randn(*size).requires_grad_() for size in ((num_tokens, 1024), (1024,)))
        rms_norm.add_rms_norm(x, None, weight, 1e-6)[1].sum().backward()
        qkv = randn(num_tokens, 8 * 64).requires_grad_()
        norms = HeadNorms(*(randn(64).requires_grad_() for _ in range(2)), 1e-6)
        tables = tuple(torch.randn(num_tokens, 32, device="cuda") for _ in range(2))
        torch.autograd.backward(
            [x.float().sum() for x in heads.split_heads((qkv,), HeadShape(4, 2, 64), norms, tables)]
        )

    for num_tokens in (300, 1056, 4096):  # sums over one, four and two rounds of programs
        run(num_tokens)
    before = count()
    for num_tokens in range(301, 30_000, 1351):
        run(num_tokens)
    assert count() == before
