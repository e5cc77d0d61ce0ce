"""Fused kernels on a GPU against their plain twins, in the dtypes and at the sizes that no interpreter can test."""

import pytest
import torch
from torch.nn import functional as F

from xorl.kernels.fused import reference
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


def test_scores_and_rounded_logits():
    # Catches a row kernel that reads a bf16 row as another, and a choice that is not the argmax.
    hidden, weight, labels = make_head(300, 64, 9001, torch.bfloat16, torch.bfloat16)
    logits = (hidden @ weight.t()).float()
    labels[:50] = logits[:50].argmax(-1)
    loss, correct = linear_cross_entropy_scores(hidden, weight, labels, logits_fp32=False)
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


def test_linear_cross_entropy_is_the_same_to_the_bit():
    # Catches sums whose order depends on which program comes first.
    results = []
    for _ in range(2):
        hidden, weight, labels = make_head(1000, 256, 9001, torch.bfloat16, torch.bfloat16)
        leaves = [hidden.requires_grad_(), weight.requires_grad_()]
        total, _ = linear_cross_entropy_sum(*leaves, labels, chunk_tokens=256)
        results.append((total.detach(), *torch.autograd.grad(total, leaves)))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_the_row_kernel_matches_its_twin_in_bf16():
    # Catches a gradient that overwrites logits of the same row before they are read.
    from xorl.kernels.fused import cross_entropy  # noqa: PLC0415 - needs Triton

    labels = torch.randint(50_257, (64,), generator=torch.Generator().manual_seed(2)).cuda()
    logits = randn(64, 50_257)
    wanted_gradient = torch.empty(64, 50_257, device="cuda", dtype=torch.float64)
    wanted, _ = reference.cross_entropy_rows(logits.double(), labels, None, wanted_gradient)
    loss, _ = cross_entropy.cross_entropy_rows(logits, labels, None, logits)
    assert_close("loss", loss, wanted, TOLERANCES[torch.float32])
    assert_close("gradient", logits, wanted_gradient, TOLERANCES[torch.bfloat16])
