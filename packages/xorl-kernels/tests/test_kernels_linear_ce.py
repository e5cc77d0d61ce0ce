"""Cross entropy from hidden states against cross entropy from full logits."""

import pytest
import torch
from torch.nn import functional as F

from xorl.kernels.linear_ce import linear_cross_entropy
from xorl.kernels.testing import assert_matches_reference


def full_logits(hidden, weight, labels):
    """The definition: (loss, logprob) of each token."""
    loss = F.cross_entropy(hidden @ weight.t(), labels, reduction="none")
    return loss, -loss


def make_inputs(num_tokens, width, vocab_size, dtype, ignored):
    """Random hidden states, weight and labels; every `ignored`-th label is -100."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, width, generator=generator).to(dtype)
    weight = torch.randn(vocab_size, width, generator=generator).to(dtype)
    labels = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    if ignored:
        labels[::ignored] = -100
    return hidden, weight, labels


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ignored", [0, 1, 3], ids=["none ignored", "all ignored", "some ignored"])
@pytest.mark.parametrize(
    ("num_tokens", "width", "vocab_size", "chunk_tokens"),
    [(1, 8, 31, 2048), (37, 24, 101, 8), (40, 16, 50, 40), (41, 16, 50, 40), (7, 5, 2, 1)],
)
def test_matches_full_logits(num_tokens, width, vocab_size, chunk_tokens, ignored, dtype):
    """Catches wrong losses or gradients at chunk borders, at ignored labels, and through either output."""
    assert_matches_reference(
        lambda *inputs: linear_cross_entropy(*inputs, chunk_tokens=chunk_tokens),
        full_logits,
        make_inputs(num_tokens, width, vocab_size, dtype, ignored),
    )


def test_ignored_tokens_lose_nothing_and_pull_on_nothing():
    """Catches padding that trains: its loss, log-probability and gradient are exactly zero."""
    hidden, weight, labels = make_inputs(9, 8, 11, torch.float32, ignored=2)
    hidden.requires_grad_()
    loss, logprob = linear_cross_entropy(hidden, weight, labels, chunk_tokens=4)
    loss.sum().backward()
    assert hidden.grad is not None
    for values in (loss, logprob, hidden.grad):
        assert not values[::2].any()
        assert values[1::2].any()


def test_losses_and_gradients_do_not_depend_on_the_chunk():
    """Catches state that leaks from one chunk to the next."""
    inputs = make_inputs(50, 8, 11, torch.float64, ignored=3)
    results = []
    for chunk_tokens in (1, 7, 50, 2048):
        hidden, weight = (x.clone().requires_grad_() for x in inputs[:2])
        loss, _ = linear_cross_entropy(hidden, weight, inputs[2], chunk_tokens=chunk_tokens)
        results.append((loss, *torch.autograd.grad(loss.square().sum(), (hidden, weight))))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=1e-12)


def test_outputs_are_fp32_for_half_precision_and_fp32_weights_are_taken():
    """Catches losses rounded to bfloat16, and a head kept in fp32 that no longer multiplies with bfloat16 states."""
    hidden, weight, labels = make_inputs(9, 8, 11, torch.bfloat16, ignored=0)
    wide = weight.float().requires_grad_()
    loss, logprob = linear_cross_entropy(hidden, wide, labels)
    loss.sum().backward()
    assert (loss.dtype, logprob.dtype) == (torch.float32, torch.float32)
    assert wide.grad is not None
    assert wide.grad.dtype == torch.float32
    assert torch.equal(loss, linear_cross_entropy(hidden, weight, labels)[0])


def test_no_tokens_give_no_losses():
    """Catches a crash on a row without tokens."""
    hidden, weight, labels = make_inputs(0, 8, 11, torch.float32, ignored=0)
    hidden.requires_grad_()
    loss, _ = linear_cross_entropy(hidden, weight.requires_grad_(), labels)
    loss.sum().backward()
    assert loss.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_backward_of_backward_is_refused():
    """Catches a second derivative that would be silently wrong."""
    hidden, weight, labels = make_inputs(3, 8, 11, torch.float64, ignored=0)
    loss, _ = linear_cross_entropy(hidden.requires_grad_(), weight, labels)
    (gradient,) = torch.autograd.grad(loss.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("hidden", "weight", "labels", "chunk_tokens", "message"),
    [
        ((4, 8), (11, 7), (4,), 1, r"\[4, 8\] and \[11, 7\]"),
        ((2, 2, 8), (11, 8), (4,), 1, r"want hidden \[T, D\]"),
        ((4, 8), (11, 8), (3,), 1, "one label for each of 4 tokens"),
        ((4, 8), (11, 8), (4,), 0, "chunk_tokens must be at least 1"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(hidden, weight, labels, chunk_tokens, message):
    """Catches broadcasting of labels or an unshaped error from inside the kernel."""
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(
            torch.zeros(hidden),
            torch.zeros(weight),
            torch.zeros(labels, dtype=torch.int64),
            chunk_tokens=chunk_tokens,
        )
