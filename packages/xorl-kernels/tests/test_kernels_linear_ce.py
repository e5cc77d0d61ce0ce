"""Cross entropy from hidden states against cross entropy from full logits."""

import pytest
import torch
from torch.nn import functional as F

from xorl.kernels import linear_ce
from xorl.kernels.head import HeadWeight, LogitOptions
from xorl.kernels.linear_ce import (
    GRADIENT_BYTES,
    LOGITS_BYTES,
    chunk_rows,
    linear_cross_entropy,
    linear_cross_entropy_scores,
    linear_cross_entropy_sum,
)
from xorl.kernels.testing import TOLERANCES, assert_close, assert_matches_reference


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "width", "vocab_size", "chunk_tokens", "ignored"),
    [(1, 8, 31, None, 0), (37, 24, 101, 8, 3), (40, 16, 50, 40, 1), (7, 5, 2, 1, 2)],
)
def test_sum_matches_full_logits(num_tokens, width, vocab_size, chunk_tokens, ignored, weighted, dtype):
    """Catches a gradient taken in the forward pass that misses a chunk, a weight, or the gradient of the sum."""
    hidden, weight, labels = make_inputs(num_tokens, width, vocab_size, dtype, ignored)
    token_weight = torch.linspace(-1, 2, num_tokens) if weighted else None

    def summed(hidden, weight, labels):
        total, loss = linear_cross_entropy_sum(
            hidden, weight, labels, token_weight=token_weight, chunk_tokens=chunk_tokens
        )
        assert not loss.requires_grad
        return total

    def plain(hidden, weight, labels):
        loss, _ = full_logits(hidden, weight, labels)
        return (loss if token_weight is None else loss * token_weight).sum()

    assert_matches_reference(summed, plain, (hidden, weight, labels))


@pytest.mark.parametrize(
    ("weight_dtype", "chunk_tokens", "mean_error"),
    [(torch.float32, 64, 3e-3), (torch.float32, 4, 3e-3), (torch.bfloat16, 64, 6e-3), (torch.bfloat16, 4, 3e-3)],
)
def test_gradient_of_the_weight_over_chunks(weight_dtype, chunk_tokens, mean_error):
    """Catches a gradient of the weight that loses more than 8 roundings, or any for an fp32 weight."""
    hidden, weight, labels = make_inputs(512, 24, 101, torch.bfloat16, ignored=5)
    weight = weight.to(weight_dtype).requires_grad_()
    linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=chunk_tokens)[0].backward()
    wide = weight.detach().double().requires_grad_()
    full_logits(hidden.double(), wide, labels)[0].sum().backward()
    assert weight.grad.dtype == weight_dtype
    assert (weight.grad - wide.grad).norm() <= mean_error * wide.grad.norm()


CAP = 2.0


def capped_logits(hidden, weight, labels):
    """The definition of a head with a cap: (loss, logprob) of each token."""
    loss = F.cross_entropy(CAP * torch.tanh(hidden @ weight.t() / CAP), labels, reduction="none")
    return loss, -loss


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("frozen_head", [False, True])
def test_a_cap_on_logits(frozen_head, dtype):
    """Catches a cap that one of the functions forgets, and a gradient that is that of the capped logits."""
    hidden, weight, labels = make_inputs(37, 24, 101, dtype, ignored=3)
    factors = torch.linspace(-1, 2, 37)
    fixed = (weight,) if frozen_head else ()
    inputs = (hidden, labels) if frozen_head else (hidden, weight, labels)

    def with_head(function):
        def call(hidden, *others):
            weight, labels = (*fixed, *others)
            return function(hidden, HeadWeight(weight, LogitOptions(softcap=CAP)), labels)

        return call

    def plain(hidden, *others):
        weight, labels = (*fixed, *others)
        return capped_logits(hidden, weight.to(hidden.dtype), labels)

    def summed(hidden, head, labels):
        return linear_cross_entropy_sum(hidden, head, labels, token_weight=factors, chunk_tokens=8)[0]

    def each(hidden, head, labels):
        return linear_cross_entropy(hidden, head, labels, chunk_tokens=8)

    assert_matches_reference(with_head(each), plain, inputs)
    assert_matches_reference(with_head(summed), lambda *args: (plain(*args)[0] * factors).sum(), inputs)
    wide = hidden.double(), weight.double()
    loss, correct = with_head(linear_cross_entropy_scores)(hidden, *inputs[1:])
    assert_close("score", loss, capped_logits(*wide, labels)[0], TOLERANCES[torch.float32])
    if dtype == torch.float64:
        logits = linear_ce.wide_logits(hidden, HeadWeight(weight, LogitOptions(softcap=CAP)))
        torch.testing.assert_close(logits, CAP * torch.tanh(wide[0] @ wide[1].t() / CAP))
        assert torch.equal(correct, logits.argmax(-1) == labels)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
@pytest.mark.parametrize("function", [linear_cross_entropy, linear_cross_entropy_sum])
def test_a_frozen_head_or_trunk_gets_no_gradient(function, frozen):
    """Catches a gradient that is computed, or comes out wrong, where only the other one is asked for."""
    hidden, weight, labels = make_inputs(9, 8, 11, torch.float64, ignored=2)
    results = []
    is_sum = function is linear_cross_entropy_sum
    for loss_of in (
        lambda *inputs: function(*inputs)[0] if is_sum else function(*inputs, chunk_tokens=4)[0].square().sum(),
        lambda *inputs: full_logits(*inputs)[0].sum() if is_sum else full_logits(*inputs)[0].square().sum(),
    ):
        leaves = [hidden.clone(), weight.clone()]
        wanted = [x.requires_grad_() for x, name in zip(leaves, ("hidden", "weight"), strict=True) if name != frozen]
        if frozen == "both":
            [x.requires_grad_(False) for x in leaves]
            assert not loss_of(*leaves, labels).requires_grad
        else:
            results.append(torch.autograd.grad(loss_of(*leaves, labels), wanted))
    if results:
        torch.testing.assert_close(*results, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_frozen_head_takes_the_gradient_of_each_token_once(dtype):
    """Catches a gradient from the forward pass that is not multiplied row by row, or not a second time."""
    inputs = make_inputs(37, 24, 101, dtype, ignored=3)
    factors = torch.linspace(-2, 3, 37)

    def gradient(states, weight, loss_of):
        states = states.clone().requires_grad_()
        total = (loss_of(states, weight, inputs[2])[1] * factors).sum()
        first, again = (torch.autograd.grad(total, states, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, again)
        return first

    got = gradient(inputs[0], inputs[1], lambda *args: linear_cross_entropy(*args, chunk_tokens=8))
    wanted = gradient(inputs[0].double(), inputs[1].double(), full_logits)
    assert got.dtype == dtype
    assert_close("gradient", got, wanted, TOLERANCES[dtype])


def test_gradient_of_the_sum_multiplies_once():
    """Catches a second backward pass that would multiply the kept gradients twice, and a copy of the weight's."""
    hidden, weight, labels = make_inputs(9, 8, 11, torch.float64, ignored=2)
    weight.requires_grad_()
    total, _ = linear_cross_entropy_sum(hidden, weight, labels)
    kept = total.grad_fn.saved_tensors[1].data_ptr()
    (3 * total).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
    wide = weight.detach().clone().requires_grad_()
    (3 * full_logits(hidden, wide, labels)[0].sum()).backward()
    torch.testing.assert_close(weight.grad, wide.grad, rtol=0, atol=1e-12)
    weight.grad = None
    total, _ = linear_cross_entropy_sum(hidden, weight, labels)
    kept = total.grad_fn.saved_tensors[1].data_ptr()
    total.backward()
    assert weight.grad.data_ptr() == kept


@pytest.mark.parametrize("function", [linear_cross_entropy, linear_cross_entropy_scores])
def test_logits_may_be_rounded_to_the_dtype_of_the_states(function):
    """Catches `logits_fp32` having no effect, or one on the precision of the softmax."""
    hidden, weight, labels = make_inputs(20, 32, 200, torch.bfloat16, ignored=0)
    wide = hidden.float() @ weight.float().t()
    for logits_fp32, logits in ((True, wide), (False, wide.bfloat16().float())):
        loss, _ = function(hidden, HeadWeight(weight, LogitOptions(fp32=logits_fp32)), labels, chunk_tokens=7)
        assert_close("loss", loss, F.cross_entropy(logits, labels, reduction="none"), TOLERANCES[torch.float32])
    assert not torch.allclose(wide, wide.bfloat16().float(), rtol=1e-4)


def test_scores_say_which_labels_are_the_most_likely():
    """Catches an accuracy that counts ignored tokens, or another chunk's."""
    hidden, weight, labels = make_inputs(50, 8, 5, torch.float32, ignored=3)
    loss, correct = linear_cross_entropy_scores(hidden, weight.requires_grad_(), labels, chunk_tokens=7)
    assert torch.equal(loss, linear_cross_entropy(hidden, weight, labels, chunk_tokens=7)[0].detach())
    assert torch.equal(correct, (hidden @ weight.t()).argmax(-1) == labels)
    assert 0 < correct.sum() < 33
    assert not correct[::3].any()


@pytest.mark.parametrize("function", [linear_cross_entropy, linear_cross_entropy_sum])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_compiled_caller_gets_the_same(is_frozen, function):
    """Catches an operator that breaks the graph, or whose shapes are described wrongly."""
    hidden, weight, labels = make_inputs(9, 8, 11, torch.float32, ignored=2)

    def gradients(call):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_(not is_frozen)]
        return torch.autograd.grad(call(*leaves), leaves[:1] if is_frozen else leaves)

    def call(hidden, weight):
        return 2 * function(hidden * 2, weight, labels)[0].sum()

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(compiled), gradients(call), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("logits_fp32", [True, False])
def test_logits_exist_for_a_part_of_a_chunk(dtype, logits_fp32, monkeypatch):
    """Catches a part whose loss or gradient lands elsewhere, and a chunk or a part of a few tokens left out."""
    hidden, weight, labels = make_inputs(700, 8, 31, dtype, ignored=3)
    token_weight = torch.linspace(-1, 2, 700)

    def gradients():
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        head = HeadWeight(leaves[1], LogitOptions(fp32=logits_fp32))
        total, loss = linear_cross_entropy_sum(leaves[0], head, labels, token_weight=token_weight, chunk_tokens=300)
        return loss, *torch.autograd.grad(total, leaves)

    wanted = gradients()
    monkeypatch.setattr(linear_ce, "chunk_rows", lambda *args: 128)
    for got, value in zip(gradients(), wanted, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("num_tokens", "bytes_per_row", "limit", "rows"),
    [
        (2048, 4 * 151_936, LOGITS_BYTES, 512),
        (8192, 2 * 151_936, GRADIENT_BYTES, 2048),
        (8500, 2 * 151_936, GRADIENT_BYTES, 1792),
        (100, 4 * 151_936, LOGITS_BYTES, 128),
        (4096, 4 * 512, LOGITS_BYTES, 4096),
        (5, 2 * LOGITS_BYTES, LOGITS_BYTES, 1),
        (0, 4, LOGITS_BYTES, 1),
    ],
)
def test_chunks_are_as_large_as_the_buffers_may_be(num_tokens, bytes_per_row, limit, rows):
    """Catches memory that grows with the vocabulary, and a last chunk of a few rows, which costs as much as a whole."""
    assert chunk_rows(num_tokens, bytes_per_row, limit) == rows
    assert rows == 1 or rows * bytes_per_row <= limit


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


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("function", [linear_cross_entropy, linear_cross_entropy_sum])
def test_a_hidden_state_that_is_not_finite_reaches_no_gradient_from_an_ignored_token(function, bad):
    """Catches padding that is masked by a factor of 0, which is NaN for what is not finite: a NaN in the whole head."""
    hidden, weight, labels = make_inputs(9, 8, 11, torch.float32, ignored=2)
    gradients = []
    for value in (0.0, bad):
        leaves = [hidden.clone(), weight.clone()]
        leaves[0][0] = value
        assert labels[0] == -100
        for leaf in leaves:
            leaf.requires_grad_()
        function(*leaves, labels, chunk_tokens=4)[0].sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for clean, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, clean, rtol=0, atol=0)


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
        ((2, 2, 8), (11, 8), (4,), 1, r"expected hidden \[T, D\]"),
        ((4, 8), (11, 8), (3,), 1, r"labels must have shape \[4\]"),
        ((4, 8), (11, 8), (4,), 0, "chunk_tokens must be an integer of at least 1, or None"),
    ],
)
@pytest.mark.parametrize("function", [linear_cross_entropy, linear_cross_entropy_sum, linear_cross_entropy_scores])
def test_shapes_that_do_not_fit_are_refused(function, hidden, weight, labels, chunk_tokens, message):
    """Catches broadcasting of labels or an unshaped error from inside the kernel."""
    with pytest.raises(ValueError, match=message):
        function(
            torch.zeros(hidden), torch.zeros(weight), torch.zeros(labels, dtype=torch.int64), chunk_tokens=chunk_tokens
        )
