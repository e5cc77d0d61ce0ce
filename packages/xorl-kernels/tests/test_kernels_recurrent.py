"""Recurrent layers over packed rows: chunks against the recurrence token by token, and documents in any row."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from xorl.kernels.layout import RankGroup, SequenceLayout, ShardedLayout
from xorl.kernels.recurrent import (
    causal_conv,
    causal_conv_with_states,
    gated_delta,
    gated_delta_with_states,
    state_space,
    state_space_with_states,
)
from xorl.kernels.testing import Tolerance, assert_matches_reference

# One token, less than the taps, less than a chunk, chunks that end with the document, and some chunks and a rest.
LENGTHS = [1, 37, 3, 128, 200, 1, 64, 2]
NUM_KEY_HEADS, NUM_HEADS, K, V, TAPS = 2, 6, 8, 5, 4


def delta_inputs(num_tokens, dtype=torch.float64):
    """q, k, v, g and beta; decays from almost none to almost all, and betas above 1 (negative eigenvalues)."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(normal(num_tokens, NUM_KEY_HEADS, K), dim=-1).to(dtype) for _ in "qk")
    g, beta = -normal(num_tokens, NUM_HEADS).mul(2).exp(), 2 * normal(num_tokens, NUM_HEADS).sigmoid()
    return q, k, normal(num_tokens, NUM_HEADS, V).to(dtype), g.to(wide), beta.to(wide)


def space_inputs(num_tokens, dtype=torch.float64):
    """x, dt, a, b, c and d."""
    b, c, x, g, _ = delta_inputs(num_tokens, dtype)
    return x, F.softplus(g), -torch.rand(NUM_HEADS).mul(3).exp().to(g), b, c, torch.linspace(-1, 1, NUM_HEADS).to(g)


def conv_inputs(num_tokens, dtype=torch.float64):
    """x, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((num_tokens, 7), (7, TAPS), (7,))
    )


def delta_of_document(q, k, v, g, beta, state=None):
    """The recurrence token by token and head by head."""
    outs, finals = [], []
    for head in range(v.shape[1]):
        key_head = head // (v.shape[1] // k.shape[1])
        s = v.new_zeros(k.shape[2], v.shape[2]) if state is None else state[head]
        rows = []
        for t in range(len(v)):
            s = s * g[t, head].exp()
            d = beta[t, head] * (v[t, head] - s.T @ k[t, key_head])
            s = s + torch.outer(k[t, key_head], d)
            rows.append(s.T @ q[t, key_head])
        outs.append(torch.stack(rows))
        finals.append(s)
    return torch.stack(outs, dim=1), torch.stack(finals)


def space_of_document(x, dt, a, b, c, d, state=None):
    """The recurrence token by token and head by head."""
    outs, finals = [], []
    for head in range(x.shape[1]):
        group = head // (x.shape[1] // b.shape[1])
        s = x.new_zeros(b.shape[2], x.shape[2]) if state is None else state[head]
        rows = []
        for t in range(len(x)):
            s = s * (dt[t, head] * a[head]).exp() + dt[t, head] * torch.outer(b[t, group], x[t, head])
            rows.append(s.T @ c[t, group] + d[head] * x[t, head])
        outs.append(torch.stack(rows))
        finals.append(s)
    return torch.stack(outs, dim=1), torch.stack(finals)


def conv_of_document(x, weight, bias, state=None):
    """The sum over the taps of each token, then silu."""
    num_earlier = weight.shape[1] - 1
    earlier = x.new_zeros(num_earlier, x.shape[1]) if state is None else state
    joined = torch.cat((earlier, x))
    out = torch.stack([(joined[t : t + weight.shape[1]] * weight.T).sum(0) + bias for t in range(len(x))])
    return out * out.sigmoid(), joined[len(joined) - num_earlier :]


def conv(x, weight, bias, layout):
    return causal_conv(x, weight, bias, "silu", layout)


def conv_with_states(x, weight, bias, layout, states=None):
    return causal_conv_with_states(x, weight, bias, "silu", layout, states)


# name: inputs, the indices of those that have tokens, the operator without and with states, the definition
CASES = {
    "gated_delta": (delta_inputs, {0, 1, 2, 3, 4}, gated_delta, gated_delta_with_states, delta_of_document),
    "state_space": (space_inputs, {0, 1, 3, 4}, state_space, state_space_with_states, space_of_document),
    "causal_conv": (conv_inputs, {0}, conv, conv_with_states, conv_of_document),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def split_documents(inputs, of_tokens, lengths):
    """The inputs of each document alone."""
    parts = [x.split(lengths) if i in of_tokens else [x] * len(lengths) for i, x in enumerate(inputs)]
    return list(zip(*parts, strict=True))


def by_definition(definition, of_tokens, lengths):
    def compute(*inputs):
        results = [definition(*document) for document in split_documents(inputs, of_tokens, lengths)]
        return torch.cat([out for out, _ in results]), torch.stack([state for _, state in results])

    return compute


def gradients(operator, inputs, layout, grad):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = operator(*leaves, layout)
    return out.detach(), torch.autograd.grad(out, leaves, grad)


@each_case
def test_chunks_compute_the_recurrence(case):
    """Catches a wrong formula or derivative, a state that enters the next document, and heads that read another's key.

    Errors are relative to the largest value.
    """
    make_inputs, of_tokens, _, with_states, definition = case
    layout = SequenceLayout.from_lengths(LENGTHS)
    assert_matches_reference(
        lambda *inputs: with_states(*inputs, layout),
        by_definition(definition, of_tokens, LENGTHS),
        make_inputs(layout.num_tokens),
        tolerance=Tolerance(worst=1e-10, mean=1e-11),
    )


@each_case
def test_errors_in_fp32(case):
    """Catches decays as differences of sums, which lose digits, and arithmetic in less than fp32."""
    make_inputs, _, operator, *_ = case
    layout = SequenceLayout.from_lengths(LENGTHS)
    tolerance = Tolerance(worst=1e-6, mean=1e-6)
    inputs = make_inputs(layout.num_tokens, torch.float32)
    assert_matches_reference(
        lambda *inputs: operator(*inputs, layout),
        lambda *inputs: operator(*inputs, layout),
        inputs,
        tolerance=tolerance,
    )


@each_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_document_is_the_same_in_any_row(case, dtype):
    """Catches chunks that cross a border, and a sum whose order depends on the rest of the row: to the bit."""
    make_inputs, of_tokens, operator, *_ = case
    inputs = make_inputs(sum(LENGTHS), dtype)
    grad = torch.randn(len(inputs[0]), *(inputs[2] if operator is gated_delta else inputs[0]).shape[1:]).to(dtype)
    out, grads = gradients(operator, inputs, SequenceLayout.from_lengths(LENGTHS), grad)
    documents = zip(
        split_documents((out, *grads), {0} | {i + 1 for i in of_tokens}, LENGTHS),
        split_documents((grad, *inputs), {0} | {i + 1 for i in of_tokens}, LENGTHS),
        LENGTHS,
        strict=True,
    )
    for (packed, *packed_grads), (grad_alone, *inputs_alone), length in documents:
        alone, grads_alone = gradients(operator, inputs_alone, SequenceLayout.from_lengths([length]), grad_alone)
        assert torch.equal(packed, alone)
        assert all(torch.equal(packed_grads[i], grads_alone[i]) for i in of_tokens)


@each_case
def test_states_continue_a_document(case):
    """Catches states of another document or the wrong end, and a gradient that does not reach the earlier tokens."""
    make_inputs, of_tokens, operator, with_states, _ = case
    first, rest = [70, 1], [3, 130]
    inputs = make_inputs(sum(first + rest))

    def in_two_rows(*inputs):
        documents = split_documents(inputs, of_tokens, [first[0], rest[0], first[1], rest[1]])
        rows = [
            [
                torch.cat((x, y)) if i in of_tokens else x
                for i, (x, y) in enumerate(zip(documents[m], documents[n], strict=True))
            ]
            for m, n in ((0, 2), (1, 3))
        ]
        begin, states = with_states(*rows[0], SequenceLayout.from_lengths(first))
        end, _ = with_states(*rows[1], SequenceLayout.from_lengths(rest), states)
        (begin_0, begin_1), (end_0, end_1) = begin.split(first), end.split(rest)
        return torch.cat((begin_0, end_0, begin_1, end_1))

    layout = SequenceLayout.from_lengths([73, 131])
    assert_matches_reference(in_two_rows, lambda *inputs: operator(*inputs, layout), inputs)


@each_case
def test_only_the_inputs_are_kept(case):
    """Catches activations that grow with the chunks, or with the square of a document."""
    make_inputs, _, operator, *_ = case
    layout, kept = SequenceLayout.from_lengths([130, 5]), []
    inputs = [x.requires_grad_() for x in make_inputs(layout.num_tokens)]
    with saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        operator(*inputs, layout)
    num_kept = sum(x.numel() for x in kept if x.is_floating_point())
    assert num_kept == sum(x.numel() for x in inputs)


@each_case
def test_one_compilation_serves_every_row(case):
    """Catches a graph break, and lengths that become constants of compiled code."""
    make_inputs, of_tokens, operator, *_ = case
    compilations = 0

    def counting(graph, example_inputs):
        nonlocal compilations
        compilations += 1
        return graph

    compiled = torch.compile(operator, fullgraph=True, backend=counting)
    for lengths in ([5, 3], [2, 70, 1], [9, 4]):
        layout = SequenceLayout.from_lengths(lengths)
        layout.mark_dynamic()
        inputs = make_inputs(layout.num_tokens)
        for i in of_tokens:
            torch._dynamo.mark_dynamic(inputs[i], 0)
        assert torch.equal(compiled(*inputs, layout), operator(*inputs, layout))
    assert compilations == 1


@each_case
def test_operators_are_registered_correctly(case):
    """Catches shapes, strides or aliases other than those that compiled code and autograd are told."""
    make_inputs, of_tokens, operator, *_ = case
    inputs = make_inputs(9, torch.float32)
    first = [inputs[i] for i in sorted(of_tokens)]
    if operator is gated_delta:
        first = [inputs[i] for i in (2, 0, 1, 3, 4)]
    parameters = [x for i, x in enumerate(inputs) if i not in of_tokens]
    shape = (TAPS - 1, 7) if operator is conv else (NUM_HEADS, K, V)
    name = "causal_conv_silu" if operator is conv else operator.__name__
    arguments = [x.requires_grad_() for x in first], [x.requires_grad_() for x in parameters]
    for num_states, returns_states in ((0, False), (2, True)):
        states, offsets = torch.ones(num_states, *shape), torch.tensor([0, 5, 9])
        torch.library.opcheck(
            getattr(torch.ops.xorl, name).default, (*arguments, states.requires_grad_(), offsets, returns_states)
        )


@each_case
def test_a_gradient_of_a_gradient_is_refused(case):
    """Catches second derivatives that are silently zero."""
    make_inputs, _, operator, *_ = case
    inputs = [x.requires_grad_() for x in make_inputs(5)]
    out = operator(*inputs, SequenceLayout.from_lengths([5]))
    (grad,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(grad.sum(), inputs[1])


def test_a_convolution_without_bias_or_activation():
    """Catches a bias or silu that is applied anyway, and taps in reverse."""
    x, weight, _ = conv_inputs(9)
    got = causal_conv(x, weight, None, None, SequenceLayout.from_lengths([7, 2]))
    documents = [F.conv1d(F.pad(d.T, (TAPS - 1, 0)), weight[:, None], groups=7).T for d in x.split([7, 2])]
    torch.testing.assert_close(got, torch.cat(documents), rtol=0, atol=1e-13)
    one_tap = causal_conv(x, weight[:, :1], None, None, SequenceLayout.from_lengths([7, 2]))
    assert torch.equal(one_tap, x * weight[:, 0])


def test_flops_are_those_of_the_recurrence():
    """Catches a model whose recurrent layers count as nothing, or twice because the backward pass recomputes."""
    layout = SequenceLayout.from_lengths([70, 5])
    expected = {
        gated_delta: (delta_inputs, 6 * 75 * NUM_HEADS * K * V),
        state_space: (space_inputs, 4 * 75 * NUM_HEADS * K * V),
        conv: (conv_inputs, 2 * 75 * 7 * TAPS),
    }
    for operator, (make_inputs, flops) in expected.items():
        with FlopCounterMode(display=False) as counter:
            operator(*(x.requires_grad_() for x in make_inputs(75)), layout).sum().backward()
        assert counter.get_total_flops() == 3 * flops


def replaced(inputs, index, value):
    return [*inputs[:index], value, *inputs[index + 1 :]]


@pytest.mark.parametrize(
    ("operator", "make_inputs", "index", "change", "message"),
    [
        (gated_delta, delta_inputs, 0, lambda q: q[:, :1], "q and k must be"),
        (gated_delta, delta_inputs, 2, lambda v: v[:, :5], "multiple of that of key heads"),
        (gated_delta, delta_inputs, 2, lambda v: v.float(), "the same dtype"),
        (gated_delta, delta_inputs, 3, lambda g: g[:, :1], "g must be"),
        (gated_delta, delta_inputs, 4, lambda beta: beta.float(), "beta must be in torch.float64"),
        (gated_delta, delta_inputs, 2, lambda v: v.to("meta"), "on one device"),
        (state_space, space_inputs, 0, lambda x: x[:-1], "x must be"),
        (state_space, space_inputs, 1, lambda dt: dt.bfloat16(), "dt must be in"),
        (state_space, space_inputs, 2, lambda a: a[:1], "a must be"),
        (state_space, space_inputs, 5, lambda d: d.float(), "d must be in"),
        (conv, conv_inputs, 1, lambda weight: weight[None], "weight"),
        (conv, conv_inputs, 2, lambda bias: bias[:1], "bias must be"),
        (conv, conv_inputs, 0, lambda x: x.long(), "x must be a floating-point dtype"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(operator, make_inputs, index, change, message):
    """Catches inputs that would be broadcast or misread, and errors that do not name the argument."""
    inputs = make_inputs(8)
    with pytest.raises(ValueError, match=message):
        operator(*replaced(inputs, index, change(inputs[index])), SequenceLayout.from_lengths([5, 3]))


@each_case
def test_layouts_and_states_that_do_not_fit_are_refused(case):
    """Catches a part of a row, in which documents began earlier, and states of other documents."""
    make_inputs, _, operator, with_states, _ = case
    inputs, whole = make_inputs(8), SequenceLayout.from_lengths([5, 3])
    part = ShardedLayout(whole, RankGroup(0, 2, "ring"), RankGroup(0, 1, "ulysses"), "all")
    with pytest.raises(ValueError, match="layout must be of whole documents"):
        operator(*inputs, part)
    with pytest.raises(ValueError, match="must have the 9 tokens of the layout"):
        operator(*inputs, SequenceLayout.from_lengths([9]))
    _, states = with_states(*inputs, whole)
    for wrong in (states[:1], states.float()):
        with pytest.raises(ValueError, match="states must be"):
            with_states(*inputs, whole, wrong)


def test_an_unknown_activation_is_refused():
    """Catches a misspelt activation that means none."""
    with pytest.raises(ValueError, match="activation"):
        causal_conv(*conv_inputs(3), "relu", SequenceLayout.from_lengths([3]))


@each_case
def test_a_row_without_tokens(case):
    """Catches a row of no documents that fails."""
    make_inputs, _, operator, *_ = case
    inputs = [x.requires_grad_() for x in make_inputs(0)]
    out = operator(*inputs, SequenceLayout.from_lengths([]))
    out.sum().backward()
    assert len(out) == 0
    assert all(not x.grad.any() for x in inputs)
