"""Experts: every implementation against the plain twin, on odd shapes, uneven routes, padding and poisoned memory."""

from itertools import islice

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from experts_cases import SHAPES, gradients, inputs, routes, without
from xorl.kernels.experts import grouped, reference
from xorl.kernels.experts.adapted import Factors
from xorl.kernels.experts.gates import GELU_TANH, RELU2, SILU, Biases, Gate, activate
from xorl.kernels.experts.plan import RoutePlan, _route_plan
from xorl.kernels.experts.quantized import QuantizedExperts
from xorl.kernels.experts.routing import (
    _sum_routing,
    _top_experts,
    count_replayed,
    in_best_groups,
    replay_experts,
    sum_documents,
    sum_routing,
    top_experts,
)
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.quant import GROUP_SIZES, QuantFormat, QuantScheme
from xorl.kernels.testing import nan_poisoned_empty


def assert_match(found: tuple[Tensor, ...], expected: Tensor, leaves: list[Tensor]) -> None:
    """found: the output, and the gradients of the leaves. expected: the twin's output."""
    torch.testing.assert_close(found[0], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1:], gradients(expected, leaves), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["random", "same", "none to the first"])
@pytest.mark.parametrize("num_padding", [0, 4, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_match_the_twin(shape: tuple[int, ...], num_padding: int, kind: str, recompute: bool) -> None:
    # Catches swapped gate and up, transposed weights, rows of padding that are read, and gradients of empty experts,
    # also of all of them: a rank without documents has padding alone.
    tensors, ids = inputs(shape, torch.float64), routes(kind, shape)
    num_real = torch.tensor(max(shape[0] - num_padding, 0))
    with nan_poisoned_empty():
        out = grouped.experts(*tensors, ids, num_real, recompute=recompute)
        found = out, *gradients(out, tensors)
    assert_match(found, reference.experts(*tensors, ids, num_real=num_real), tensors)
    assert not out[num_real:].any()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("knows_rows", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_choices_without_an_expert_add_nothing(shape: tuple[int, ...], knows_rows: bool, share: float) -> None:
    # Catches rows of experts on other ranks that are read, and gradients of their weights that are left undefined.
    tensors, ids = inputs(shape, torch.float64), without(share, shape)
    num_rows = int((ids < shape[4]).sum()) if knows_rows else None
    with nan_poisoned_empty():
        out = grouped.experts(*tensors, ids, num_rows=num_rows)
        found = out, *gradients(out, tensors)
    assert_match(found, reference.experts(*tensors, ids), tensors)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_passes", [2, 3, 40])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("shape", SHAPES)
def test_choices_computed_in_parts_equal_all_at_once(
    shape: tuple[int, ...], share: float, num_passes: int, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Catches a part that is left out or computed twice, rows of another part, and a part without choices.
    tensors, ids = inputs(shape, torch.float64), without(share, shape)

    def results(**options: object) -> tuple[Tensor, ...]:
        with nan_poisoned_empty():
            out = grouped.experts(*tensors, ids, recompute=recompute, **options)
            return out, *gradients(out, tensors)

    expected = results()
    torch.testing.assert_close(results(num_passes=num_passes), expected, rtol=1e-11, atol=1e-11)
    # The check itself: without the last parts, what they compute is missing.
    monkeypatch.setattr(RoutePlan, "parts", lambda plan, count, parts=RoutePlan.parts: islice(parts(plan, count), 1))
    is_missing = not torch.allclose(results(num_passes=num_passes)[0], expected[0])
    has_later = int((ids < shape[4]).sum()) > -(-ids.numel() // num_passes)
    assert is_missing == has_later


def test_frozen_experts_get_no_gradient() -> None:
    # Catches products for gradients that nothing reads, and a gradient of x that depends on them.
    shape = SHAPES[0]
    tensors, ids = inputs(shape, torch.float64), routes("random", shape)
    expected = gradients(grouped.experts(*tensors, ids), tensors)
    for frozen in tensors[1:3]:
        frozen.requires_grad_(False)
    found = gradients(grouped.experts(*tensors, ids), [tensors[0], tensors[3]])
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[3])


# So low a limit that many values exceed it.
CLAMPED = Gate(alpha=1.7, limit=0.8, offset=1.0)
GATES = {"silu": SILU, "gelu": GELU_TANH, "clamped": CLAMPED}


def biases_of(shape: tuple[int, ...], dtype: torch.dtype) -> Biases:
    generator = torch.Generator().manual_seed(8)
    sizes = (shape[4], 2 * shape[3]), (shape[4], shape[2])
    return Biases(*(torch.randn(*size, generator=generator).to(dtype).requires_grad_() for size in sizes))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_passes", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_without_a_gate_match_the_twin(shape: tuple[int, ...], num_passes: int, recompute: bool) -> None:
    # Catches halves of an up product that has none, and the gradient of another power.
    (x, gate_up, *others), ids = inputs(shape, torch.float64), routes("random", shape)
    tensors = [x, gate_up[:, : shape[3]].detach().clone().requires_grad_(), *others]
    up_biases, down_biases = biases_of(shape, torch.float64)
    biases = Biases(up_biases[:, : shape[3]].detach().clone().requires_grad_(), down_biases)
    num_real, leaves = torch.tensor(max(shape[0] - 4, 0)), [*tensors, *biases]
    with nan_poisoned_empty():
        out = grouped.experts(
            *tensors, ids, num_real, gate=RELU2, biases=biases, recompute=recompute, num_passes=num_passes
        )
        found = out, *gradients(out, leaves)
    assert_match(found, reference.experts(*tensors, ids, num_real=num_real, gate=RELU2, biases=biases), leaves)
    with pytest.raises(ValueError, match=r"gate_up \[E, 1F, D\]"):
        grouped.experts(x, gate_up, *others, ids, gate=RELU2)


def test_the_gates_are_those_of_torch() -> None:
    # Catches a wrong formula of which every implementation has a copy.
    up = 3 * torch.randn(50, 8, dtype=torch.float64)
    gate, value = up.chunk(2, dim=-1)
    torch.testing.assert_close(activate(up, SILU), F.silu(gate) * value)
    torch.testing.assert_close(activate(up, RELU2), F.relu(up) ** 2)
    torch.testing.assert_close(activate(up, GELU_TANH), F.gelu(gate, approximate="tanh") * value)
    gate, value = gate.clamp(max=0.8), value.clamp(-0.8, 0.8)
    torch.testing.assert_close(activate(up, CLAMPED), gate * torch.sigmoid(1.7 * gate) * (value + 1))


@pytest.mark.parametrize("num_passes", [1, 3])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gates_and_biases_match_the_twin(
    shape: tuple[int, ...], gate: str, has_biases: bool, recompute: bool, num_passes: int
) -> None:
    # Catches the bias of another expert, biases of padding and of choices without an expert, gradients past the limit,
    # and routing weights that miss what a bias adds.
    tensors, ids = inputs(shape, torch.float64), without(0.3, shape)
    biases, num_real = biases_of(shape, torch.float64), torch.tensor(shape[0] - 2)
    leaves = [*tensors, *(biases if has_biases else ())]
    options = {"gate": GATES[gate], "biases": biases if has_biases else None, "recompute": recompute}
    with nan_poisoned_empty():
        out = grouped.experts(*tensors, ids, num_real, num_passes=num_passes, **options)
        found = out, *gradients(out, leaves)
    assert_match(found, reference.experts(*tensors, ids, num_real, **options), leaves)


@pytest.mark.parametrize("num_slots", [1, 4])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_adapted_experts_have_gates_and_biases(
    shape: tuple[int, ...], gate: str, recompute: bool, num_slots: int
) -> None:
    # Catches biases of a slot in place of those of its expert, and an adapter that is added after the activation.
    tensors, ids = inputs(shape, torch.float64), without(0.3, shape)
    biases = biases_of(shape, torch.float64)
    for frozen in (*tensors[1:3], *biases):
        frozen.requires_grad_(False)
    low_rank = factors_of(shape, torch.float64, num_slots=num_slots)
    slots = torch.randint(num_slots, (shape[0],), generator=torch.Generator().manual_seed(4))
    groups, factors = ids * num_slots + slots[:, None], Factors(*low_rank, num_slots=num_slots)
    options = {"gate": GATES[gate], "biases": biases, "factors": factors, "recompute": recompute}
    leaves = [tensors[0], tensors[3], *low_rank]
    with nan_poisoned_empty():
        out = grouped.experts(*tensors, groups, torch.tensor(shape[0] - 2), **options)
        found = out, *gradients(out, leaves)
    assert_match(found, reference.experts(*tensors, groups, torch.tensor(shape[0] - 2), **options), leaves)


# The leading dimensions of up_a, up_b, down_a and down_b that are 1.
SHARINGS = {"none": (), "outer": (0, 3), "inner": (1, 2), "all": (0, 1, 2, 3)}


def factors_of(
    shape: tuple[int, ...], dtype: torch.dtype, *, dropout: bool = False, sharing: str = "none", num_slots: int = 1
) -> list[Tensor]:
    """up_a, up_b, down_a, down_b, and with dropout the input of the first."""
    num_tokens, _, width, inner, num_experts = shape
    generator = torch.Generator().manual_seed(5)
    groups = [1 if index in SHARINGS[sharing] else num_experts * num_slots for index in range(4)]
    sizes = [(4, width), (2 * inner, 4), (3, inner), (width, 3)]
    whole = [(count, *size) for count, size in zip(groups, sizes, strict=True)]
    whole += [(num_tokens, width)] if dropout else []
    return [
        torch.randn(*size, generator=generator, dtype=torch.float64).mul(0.3).to(dtype).requires_grad_()
        for size in whole
    ]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("kind", ["random", "none to the first", "elsewhere"])
@pytest.mark.parametrize("shape", SHAPES)
def test_adapted_experts_match_the_twin(
    shape: tuple[int, ...], kind: str, sharing: str, dropout: bool, recompute: bool
) -> None:
    # Catches adapters of another expert, swapped factors, and routing weights that miss what an adapter adds.
    tensors, ids = inputs(shape, torch.float64), routes(kind, shape)
    if kind == "elsewhere":
        ids = torch.where(ids % 3 > 0, ids, shape[4])
    for frozen in tensors[1:3]:
        frozen.requires_grad_(False)
    low_rank = factors_of(shape, torch.float64, dropout=dropout, sharing=sharing)
    factors, num_real = Factors(*low_rank), torch.tensor(shape[0] - 2)
    leaves = [tensors[0], tensors[3], *low_rank]
    expected = reference.experts(*tensors, ids, num_real, factors=factors)
    with nan_poisoned_empty():
        out = grouped.experts(*tensors, ids, num_real, factors=factors, recompute=recompute)
        found = out, *gradients(out, leaves)
    assert_match(found, expected, leaves)
    merged = [tensors[0], tensors[1] + factors.up_b @ factors.up_a, tensors[2] + factors.down_b @ factors.down_a]
    if not dropout:
        torch.testing.assert_close(out, grouped.experts(*merged, tensors[3], ids, num_real), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["random", "same", "elsewhere"])
@pytest.mark.parametrize("shape", SHAPES)
def test_slots_match_separate_passes(shape: tuple[int, ...], kind: str, recompute: bool) -> None:
    # Catches tokens with another slot's adapter, and gradients of slots without tokens that are left undefined.
    tensors, ids = inputs(shape, torch.float64), routes(kind, shape)
    if kind == "elsewhere":
        ids = torch.where(ids % 3 > 0, ids, shape[4])
    for frozen in tensors[1:3]:
        frozen.requires_grad_(False)
    num_slots, num_real = 4, torch.tensor(shape[0] - 2)
    slots = torch.randint(num_slots - 1, (shape[0],), generator=torch.Generator().manual_seed(4))
    low_rank = factors_of(shape, torch.float64, num_slots=num_slots)
    factors, groups = Factors(*low_rank, num_slots=num_slots), ids * num_slots + slots[:, None]
    leaves = [tensors[0], tensors[3], *low_rank]
    with nan_poisoned_empty():
        out = grouped.experts(*tensors, groups, num_real, factors=factors, recompute=recompute)
        found = gradients(out, leaves)
    separate = torch.zeros_like(out)
    for slot in range(num_slots):
        alone = reference.experts(*tensors, ids, num_real, factors=Factors(*(f[slot::num_slots] for f in low_rank)))
        separate = torch.where((slots == slot)[:, None], alone, separate)
    expected = reference.experts(*tensors, groups, num_real, factors=factors)
    for one in (out, expected):
        torch.testing.assert_close(one, separate, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, gradients(separate, leaves), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("quant_format", ["nf4", "nvfp4", "block_fp8"])
@pytest.mark.parametrize("quantized", ["both", "gate_up", "down"])
@pytest.mark.parametrize("has_factors", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_quantised_experts_match_dense_ones(
    quant_format: QuantFormat, quantized: str, has_factors: bool, recompute: bool
) -> None:
    # Catches weights that are dequantised with another projection's scales, and what the backward pass forgets.
    shape = (19, 2, 128, 128, 3)
    tensors, ids = inputs(shape, torch.float32), routes("random", shape)
    scheme = QuantScheme(quant_format, GROUP_SIZES[quant_format])
    given: list[Tensor | QuantizedExperts] = [tensor.detach() for tensor in tensors[1:3]]
    dense = [tensor.detach() for tensor in tensors[1:3]]
    for index, name in enumerate(("gate_up", "down")):
        if quantized in ("both", name):
            rows = dense[index].flatten(0, 1)
            noise = torch.tensor([3, 1, 0]) if index else None
            global_scale = torch.rand(len(rows)) * 0.01 + 0.01 if quant_format == "nvfp4" else None
            weight = QuantizedExperts(scheme.quantize(rows, global_scale), scheme, shape[4], len(rows), noise, 0.01)
            given[index], dense[index] = weight, weight.dense(torch.float32)
    low_rank = factors_of(shape, torch.float32) if has_factors else []
    factors = Factors(*low_rank) if has_factors else None
    leaves = [tensors[0], tensors[3], *low_rank]
    expected = grouped.experts(leaves[0], *dense, leaves[1], ids, factors=factors)
    grads = gradients(expected, leaves)
    for implementation in (grouped.experts, reference.experts):
        out = implementation(leaves[0], *given, leaves[1], ids, factors=factors, recompute=recompute)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(gradients(out, leaves), grads, rtol=1e-4, atol=1e-4)


def test_an_adapters_dropout_is_the_same_in_both_passes() -> None:
    # Catches a mask that is drawn again for the backward pass, and one that scales nothing.
    shape = SHAPES[0]
    tensors, ids = inputs(shape, torch.float64), routes("random", shape)
    low_rank = factors_of(shape, torch.float64)

    def run(*given: Tensor) -> Tensor:
        torch.manual_seed(7)
        frozen = [tensor.detach() for tensor in tensors[1:3]]
        return grouped.experts(given[0], *frozen, given[1], ids, factors=Factors(*given[2:], kept=0.7))

    leaves = [tensors[0], tensors[3], *low_rank]
    direction = [torch.randn_like(leaf) for leaf in leaves]
    grads = gradients(run(*leaves), leaves)
    weight = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with torch.no_grad():
        up, down = (
            (run(*(leaf + sign * 1e-6 * d for leaf, d in zip(leaves, direction, strict=True))) * weight).sum()
            for sign in (1, -1)
        )
    slope = sum((grad * d).sum() for grad, d in zip(grads, direction, strict=True))
    torch.testing.assert_close((up - down) / 2e-6, slope, rtol=1e-6, atol=1e-6)
    torch.manual_seed(0)
    means = [
        grouped.experts(*(t.detach() for t in tensors), ids, factors=Factors(*low_rank, kept=0.5)) for _ in range(300)
    ]
    whole = grouped.experts(*(t.detach() for t in tensors), ids, factors=Factors(*low_rank))
    assert (torch.stack(means).mean(0) - whole).norm() < 0.05 * whole.norm()


def test_the_gradient_is_that_of_finite_differences() -> None:
    # Catches a twin and an implementation that are wrong alike.
    shape = (6, 2, 5, 3, 4)
    tensors, ids = inputs(shape, torch.float64), routes("random", shape)
    assert torch.autograd.gradcheck(lambda *args: grouped.experts(*args, ids, torch.tensor(5)), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_round_once(dtype: torch.dtype) -> None:
    # Catches sums over choices, or products with routing weights, in half precision.
    shape = SHAPES[2]
    tensors = inputs(shape, dtype)
    ids = routes("random", shape)
    exact = [value.detach().double().requires_grad_() for value in tensors]
    expected = reference.experts(*exact, ids)
    out = grouped.experts(*tensors, ids)
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert (out - expected).norm() < bound * expected.norm()
    for mine, theirs in zip(gradients(out, tensors), gradients(expected, exact), strict=True):
        assert (mine - theirs).norm() < bound * theirs.norm()


def test_a_plan_sorts_choices_by_expert_and_then_by_token() -> None:
    # Catches an order that differs from run to run, and padding that counts for an expert.
    ids = torch.tensor([[2, 0], [0, 1], [2, 1], [1, 2]])
    plan = RoutePlan.of(ids, 4, torch.tensor(3))
    assert plan.ends.tolist() == [2, 4, 6, 6]
    assert [choice // 2 for choice in plan.choices[:6].tolist()] == [0, 1, 1, 2, 0, 2]
    assert plan.rows.flatten()[plan.choices].tolist() == list(range(8))
    assert plan.rows[:3].tolist() == [[4, 0], [1, 2], [5, 3]]
    assert sorted(plan.rows.flatten().tolist()) == list(range(8))


def test_experts_compile_into_one_graph() -> None:
    # Catches a break of the graph, and outputs of other shapes than the operators promise.
    shape = SHAPES[0]
    biases, ids = biases_of(shape, torch.float32), routes("random", shape)
    tensors = [*inputs(shape, torch.float32), *biases]

    def block(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, *biases: Tensor) -> Tensor:
        plain = grouped.experts(x, gate_up, down, weights, ids)
        return plain + grouped.experts(x, gate_up, down, weights, ids, gate=CLAMPED, biases=Biases(*biases))

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    expected, out = block(*tensors), compiled(*tensors)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradients(out, tensors), gradients(expected, tensors))


@pytest.mark.parametrize("recompute", [False, True])
def test_operators_are_registered_correctly(recompute: bool) -> None:
    # Catches fake functions and autograd formulas that a compiler would trust and that are wrong.
    shape = SHAPES[1]
    tensors, ids = inputs(shape, torch.float32), routes("random", shape)
    plan = RoutePlan.of(ids, shape[4])
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    biases = torch.randn(shape[4], 2 * shape[3], requires_grad=True)
    arguments = (*tensors, *plan, biases, 2, recompute, "native", CLAMPED)
    torch.library.opcheck(grouped.experts_of_plan, arguments, test_utils=tests)


LENGTHS = [[1], [64, 64], [5, 130, 1, 60], [63, 2, 200]]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_documents_are_summed(lengths: list[int]) -> None:
    # Catches tokens of a neighbouring document at a boundary of blocks.
    values = torch.randn(sum(lengths), 5, dtype=torch.float64)
    sums = sum_documents(values, SequenceLayout.from_lengths(lengths).cu_seqlens)
    torch.testing.assert_close(sums, torch.stack([part.sum(0) for part in values.split(lengths)]))


@pytest.mark.parametrize("num_padding", [None, 0, 2])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_routings_are_summed_by_document(lengths: list[int], num_padding: int | None) -> None:
    # Catches padding that is counted, choices of a neighbouring document, and a wrong derivative of logsumexp.
    num_tokens, num_experts = sum(lengths), 7
    cu_seqlens = SequenceLayout.from_lengths(lengths).cu_seqlens
    logits = torch.randn(num_tokens, num_experts, dtype=torch.float64, requires_grad=True)
    ids = top_experts(logits.detach(), 3)
    num_real = None if num_padding is None else torch.tensor(num_tokens - num_padding)
    is_real = (torch.arange(num_tokens) < num_tokens - (num_padding or 0)).double()
    routing = sum_routing(logits, logits.softmax(-1), ids, cu_seqlens, num_real)
    chosen = torch.zeros_like(logits).scatter(1, ids, 1.0) * is_real[:, None]
    expected = [
        torch.stack([part.sum(0) for part in values.split(lengths)])
        for values in (chosen, logits.softmax(-1) * is_real[:, None], logits.logsumexp(-1).square() * is_real)
    ]
    assert torch.equal(routing.counts.double(), expected[0])
    torch.testing.assert_close(routing[1:], tuple(expected[1:]))
    grads = [torch.randn_like(value) for value in expected[1:]]
    torch.testing.assert_close(
        torch.autograd.grad(routing[1:], logits, grads), torch.autograd.grad(expected[1:], logits, grads)
    )
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    arguments = (logits, logits.softmax(-1), ids, cu_seqlens, num_real)
    torch.library.opcheck(_sum_routing, arguments, test_utils=tests)
    torch.library.opcheck(_route_plan, (ids, num_experts, num_real))


def test_of_equal_scores_the_lowest_expert_wins() -> None:
    # Catches a choice that depends on the device.
    scores = torch.tensor([[0.5, 0.9, 0.5, 0.9, 0.1], [0.2, 0.2, 0.2, 0.2, 0.2]])
    assert top_experts(scores, 3).tolist() == [[1, 3, 0], [0, 1, 2]]
    torch.library.opcheck(_top_experts, (scores, 3))


def test_a_group_is_as_good_as_its_two_best_experts() -> None:
    # Catches a group that is chosen for its best expert alone, or for all of them, and groups that are mixed up.
    scores = torch.tensor(
        [[0.9, 0.1, 0.0, 0.6, 0.6, 0.0, 0.5, 0.5, 0.5], [-0.9, -0.8, -0.1, 0.0, -2.0, 0.0, -0.2, -0.3, 0]]
    )
    kept = in_best_groups(scores, 3, 1).isfinite()
    assert kept.tolist() == [[False] * 3 + [True] * 3 + [False] * 3] * 2
    assert torch.equal(in_best_groups(scores, 3, 2)[0, :6], scores[0, :6])
    assert top_experts(in_best_groups(scores, 3, 1), 2).tolist() == [[3, 4], [3, 5]]


def test_recorded_experts_replace_the_choice_and_are_counted() -> None:
    # Catches an order of experts that counts as a difference, padding that is counted, tokens without a record, and
    # a first expert with the number 0 that is taken for none.
    ids = torch.tensor([[0, 1], [2, 3], [4, 0], [1, 2], [3, 4], [0, 1]])
    recorded = torch.tensor([[1, 0], [-1, -1], [4, 1], [0, 3], [-1, -1], [2, 3]], dtype=torch.int16)
    chosen = [[1, 0], [2, 3], [4, 1], [0, 3], [3, 4], [2, 3]]
    assert replay_experts(ids, recorded).tolist() == chosen
    assert replay_experts(ids, recorded).dtype == torch.int64
    cu_seqlens = torch.tensor([0, 2, 2, 4, 6], dtype=torch.int32)
    assert count_replayed(ids, recorded, cu_seqlens, None).tolist() == [[2, 0], [0, 0], [4, 3], [2, 2]]
    assert count_replayed(ids, recorded, cu_seqlens, torch.tensor(4)).tolist() == [[2, 0], [0, 0], [4, 3], [0, 0]]
