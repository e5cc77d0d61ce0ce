"""Layers of experts on a GPU against their plain twin, in the dtypes and at sizes that no interpreter can test."""

import pytest
import torch
from torch import Tensor

from xorl.kernels.experts import EXPERTS, ExpertsFn, ExpertsRequest, reference, rows, rows_triton
from xorl.kernels.experts.adapted import Factors
from xorl.kernels.experts.gates import GELU_TANH, SILU, Biases, Gate
from xorl.kernels.experts.plan import RoutePlan
from xorl.kernels.experts.quantized import QuantizedExperts
from xorl.kernels.experts.routing import sum_routing, top_experts
from xorl.kernels.quant import GROUP_SIZES, QuantFormat, QuantScheme
from xorl.kernels.quant.nvfp4 import nvfp4_global_scale
from xorl.kernels.testing import nan_poisoned_empty

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16

# T, K, D, F, E.
SHAPES = [(1000, 8, 256, 96, 60), (77, 2, 512, 1408, 8), (4096, 8, 2048, 768, 128)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """x, gate_up, down and weights; ids."""
    num_tokens, num_choices, width, inner, num_experts = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=generator, device="cuda") * scale).to(dtype).requires_grad_()

    scores = torch.rand(num_tokens, num_experts, generator=generator, device="cuda").softmax(-1)
    ids = top_experts(scores, num_choices)
    tensors = [
        normal(num_tokens, width),
        normal(num_experts, 2 * inner, width, scale=width**-0.5),
        normal(num_experts, width, inner, scale=inner**-0.5),
        scores.gather(-1, ids).requires_grad_(),
    ]
    return tensors, ids


def resolve(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> ExpertsFn:
    try:
        return EXPERTS.resolve(name, ExpertsRequest("cuda", dtype, *shape[2:4]))
    except RuntimeError as error:
        pytest.skip(str(error))


def assert_match(
    found: tuple[Tensor, ...], expected: Tensor, exact: list[Tensor], grad: Tensor, bound_of_bf16: float = 2e-2
) -> None:
    """found: the output, and the gradients of `exact` from that of the output, `grad`. expected: the twin's output."""
    bound = 1e-5 if grad.dtype == torch.float32 else bound_of_bf16
    for mine, theirs in zip(found, (expected, *torch.autograd.grad(expected, exact, grad.double())), strict=True):
        assert (mine - theirs).norm() <= bound * theirs.norm()


@pytest.mark.parametrize("kind", ["random", "same", "some elsewhere", "all elsewhere"])
@pytest.mark.parametrize(
    ("name", "dtype"), [("native", BF16), ("triton", BF16), ("triton", torch.float32), ("quack", BF16)], ids=str
)
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_match_the_twin(shape: tuple[int, ...], name: str, dtype: torch.dtype, kind: str) -> None:
    # Catches groups without rows, rows of padding that are read, and sums that are rounded more than once.
    experts = resolve(name, shape, dtype)
    tensors, ids = inputs(shape, dtype)
    num_rows = None
    if kind == "same":
        ids = ids[:1].expand_as(ids).contiguous()
    if kind.endswith("elsewhere"):  # on other ranks
        is_elsewhere = ids % 4 > 0 if kind.startswith("some") else torch.ones_like(ids, dtype=torch.bool)
        is_elsewhere[-5:] = True
        ids = ids.masked_fill(is_elsewhere, shape[4])
        num_rows = int((~is_elsewhere).sum())
    num_real = torch.tensor(shape[0] - 5, device="cuda")
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = reference.experts(*exact, ids, num_real)
    with nan_poisoned_empty():
        out = experts(*tensors, ids, num_real, num_rows=num_rows)
        grad = torch.randn_like(out)
        found = torch.autograd.grad(out, tensors, grad)
    assert_match((out, *found), expected, exact, grad)
    assert not out[-5:].any()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_passes", [2, 3])
@pytest.mark.parametrize(("share", "num_needed"), [(0.7, 1), (0.2, 3)])
@pytest.mark.parametrize(("name", "dtype"), [("native", BF16), ("triton", torch.float32), ("quack", BF16)], ids=str)
def test_choices_in_parts_match_the_twin(
    name: str, dtype: torch.dtype, share: float, num_needed: int, num_passes: int, recompute: bool
) -> None:
    # Catches a part that is left out, rows of another part, and a kernel that fails at a part without choices.
    shape = SHAPES[0]
    experts = resolve(name, shape, dtype)
    tensors, ids = inputs(shape, dtype)
    generator = torch.Generator("cuda").manual_seed(2)
    is_absent = torch.rand(ids.shape, generator=generator, device="cuda") < share
    ids = ids.masked_fill(is_absent, shape[4])
    assert -(-int((~is_absent).sum()) // -(-ids.numel() // num_passes)) == min(num_needed, num_passes)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = reference.experts(*exact, ids)
    with nan_poisoned_empty():
        out = experts(*tensors, ids, num_passes=num_passes, recompute=recompute)
        grad = torch.randn_like(out)
        found = torch.autograd.grad(out, tensors, grad)
    assert_match((out, *found), expected, exact, grad)


@pytest.mark.parametrize("kind", ["random", "same", "some elsewhere"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_in_fp8_match_their_plain_form(shape: tuple[int, ...], recompute: bool, kind: str) -> None:
    # Catches a scale of another row or expert, rows of padding that are read, and gradients of weights in fp8.
    experts = resolve("fp8", shape, BF16)
    tensors, ids = inputs(shape, BF16)
    if kind == "same":
        ids = ids[:1].expand_as(ids).contiguous()
    if kind == "some elsewhere":
        ids = ids.masked_fill(ids % 4 > 0, shape[4])
    num_real = torch.tensor(shape[0] - 5, device="cuda")
    plain = [tensor.detach().cpu().requires_grad_() for tensor in tensors]
    with nan_poisoned_empty():
        out = experts(*tensors, ids, num_real, recompute=recompute)
        grad = torch.randn_like(out)
        found = out, *torch.autograd.grad(out, tensors, grad)
    expected = experts(*plain, ids.cpu(), num_real.cpu())
    expected = expected, *torch.autograd.grad(expected, plain, grad.cpu())
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    twin = reference.experts(*exact, ids, num_real)
    twin = twin, *torch.autograd.grad(twin, exact, grad.double())
    for mine, theirs, exactly in zip(found, expected, twin, strict=True):
        # Hopper's fast accumulation; a value that rounds to the next one in fp8 here and there.
        assert (mine.cpu().float() - theirs.float()).norm() <= 2e-2 * theirs.float().norm()
        assert (mine - exactly).norm() <= 0.1 * exactly.norm()
    assert (out - twin[0]).norm() > 5e-3 * twin[0].norm(), "that is not fp8"
    assert not out[-5:].any()


def test_products_in_fp8_repeat_to_the_bit() -> None:
    # Catches a maximum or a sum whose result depends on the order in which the GPU does it.
    shape = SHAPES[2]
    experts = resolve("fp8", shape, BF16)
    tensors, ids = inputs(shape, BF16)
    grad = torch.randn_like(tensors[0])

    def run() -> list[Tensor]:
        out = experts(*tensors, ids)
        return [out, *torch.autograd.grad(out, tensors, grad)]

    first = run()
    for _ in range(3):
        assert all(torch.equal(one, other) for one, other in zip(run(), first, strict=True))


# Low enough that many values exceed the limit.
GATES = {"silu": SILU, "gelu": GELU_TANH, "clamped": Gate(alpha=1.7, limit=0.8, offset=1.0)}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype"), [("native", BF16), ("triton", BF16), ("triton", torch.float32), ("quack", BF16)], ids=str
)
@pytest.mark.parametrize("shape", [*SHAPES[:2], (2048, 4, 2880, 2880, 8)])
def test_gates_and_biases_match_the_twin(
    shape: tuple[int, ...], name: str, dtype: torch.dtype, recompute: bool, gate: str
) -> None:
    # Catches the bias of another expert, biases of padding, gradients past the limit, widths that no tile divides, and
    # a part that makes the host wait or differs when it is repeated.
    experts = resolve(name, shape, dtype)
    tensors, ids = inputs(shape, dtype)
    sizes = (shape[4], 2 * shape[3]), (shape[4], shape[2])
    tensors += [torch.randn(*size, device="cuda").to(dtype).requires_grad_() for size in sizes]
    num_real = torch.tensor(shape[0] - 5, device="cuda")
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = reference.experts(*exact[:4], ids, num_real, gate=GATES[gate], biases=Biases(*exact[4:]))
    grad = torch.randn_like(tensors[0])

    def run() -> tuple[Tensor, ...]:
        biases = Biases(*tensors[4:])
        out = experts(*tensors[:4], ids, num_real, gate=GATES[gate], biases=biases, recompute=recompute)
        return out, *torch.autograd.grad(out, tensors, grad)

    with nan_poisoned_empty():
        found = run()
    # Rounding moves values across the limit.
    assert_match(found, expected, exact, grad, bound_of_bf16=5e-2 if gate == "clamped" else 2e-2)
    assert not found[0][-5:].any()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


# By kind: the leading dimensions of the factors that are 1, the number of slots, and the format of the base.
ADAPTED: dict[str, tuple[tuple[int, ...], int, QuantFormat | None]] = {
    "each": ((), 1, None),
    "outer": ((0, 3), 1, None),
    "all": ((0, 1, 2, 3), 1, None),
    "slots": ((), 3, None),
    "nf4": ((), 1, "nf4"),
    "block_fp8": ((0, 3), 1, "block_fp8"),
}


@pytest.mark.parametrize("kind", ADAPTED)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("name", "dtype"), [("native", BF16), ("triton", torch.float32), ("quack", BF16)], ids=str)
def test_adapted_experts_match_the_twin(name: str, dtype: torch.dtype, recompute: bool, kind: str) -> None:
    # Catches ranks that a product cannot read, groups of slots without rows, and weights of another projection.
    shape, rank = (1000, 8, 256, 384, 60), 8
    shared, num_slots, quant_format = ADAPTED[kind]
    experts = resolve(name, shape, dtype)
    tensors, ids = inputs(shape, dtype)
    _, _, width, inner, num_experts = shape
    generator = torch.Generator("cuda").manual_seed(1)
    sizes = [(rank, width), (2 * inner, rank), (rank, inner), (width, rank)]
    low_rank = [
        (torch.randn(1 if i in shared else num_experts * num_slots, *size, generator=generator, device="cuda") * 0.2)
        .to(dtype)
        .requires_grad_()
        for i, size in enumerate(sizes)
    ]
    groups = ids * num_slots + torch.arange(len(ids), device="cuda")[:, None] % num_slots
    base: list[Tensor | QuantizedExperts] = [tensor.detach() for tensor in tensors[1:3]]
    dense = [tensor.detach().double() for tensor in tensors[1:3]]
    if quant_format is not None:
        scheme = QuantScheme(quant_format, 64 if quant_format == "nf4" else 128)
        for i, weight in enumerate(tensors[1:3]):
            matrix = weight.detach().flatten(0, 1)
            base[i] = QuantizedExperts(scheme.quantize(matrix), scheme, num_experts, len(matrix))
            dense[i] = base[i].dense(dtype).double()
    num_real = torch.tensor(shape[0] - 5, device="cuda")
    leaves = [tensors[0], tensors[3], *low_rank]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    twin = Factors(*exact[2:], num_slots=num_slots)
    expected = reference.experts(exact[0], *dense, exact[1], groups, num_real, factors=twin)
    with nan_poisoned_empty():
        factors = Factors(*low_rank, num_slots=num_slots)
        out = experts(leaves[0], *base, leaves[1], groups, num_real, recompute=recompute, factors=factors)
        grad = torch.randn_like(out)
        found = torch.autograd.grad(out, leaves, grad)
    assert_match((out, *found), expected, exact, grad, bound_of_bf16=3e-2)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["native", "triton", "quack"])
def test_experts_repeat_to_the_bit_and_never_wait(name: str, recompute: bool) -> None:
    # Catches sums by atomic additions, and a size that the host reads from the device.
    experts = resolve(name, SHAPES[2], BF16)
    tensors, ids = inputs(SHAPES[2], BF16)

    def run() -> tuple[Tensor, ...]:
        out = experts(*tensors, ids, num_real, recompute=recompute)
        return out, *torch.autograd.grad(out, tensors, out.detach())

    num_real = torch.tensor(4000, device="cuda")
    first = run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("quant_format", list(GROUP_SIZES))
@pytest.mark.parametrize("name", ["native", "triton", "quack"])
def test_quantised_experts_keep_no_dense_weight(name: str, quant_format: QuantFormat) -> None:
    # Catches dequantised weights that each layer keeps for its backward pass, and gradients through other weights.
    experts = resolve(name, SHAPES[2], BF16)
    (x, *dense, weights), ids = inputs(SHAPES[2], BF16)
    scheme = QuantScheme(quant_format, GROUP_SIZES[quant_format])
    stored = []
    for weight in dense:
        rows_of_all = weight.detach().flatten(0, 1)
        scale = nvfp4_global_scale(rows_of_all.abs().amax()).expand(len(rows_of_all)).contiguous()
        quantized = scheme.quantize(rows_of_all, scale if quant_format == "nvfp4" else None)
        stored.append(QuantizedExperts(quantized, scheme, len(weight), len(rows_of_all)))
    dequantised = [weight.dense(BF16) for weight in stored]
    expected = experts(x, dequantised[0], dequantised[1], weights, ids)
    grad = torch.randn_like(expected)
    wanted = expected, *torch.autograd.grad(expected, (x, weights), grad)
    del dequantised
    before = torch.cuda.memory_allocated()
    out = experts(x, stored[0], stored[1], weights, ids)
    kept = torch.cuda.memory_allocated() - before
    num_rows, inner = ids.numel(), SHAPES[2][3]
    # The product with gate and up, the output, and the plan.
    assert kept <= 2 * num_rows * 2 * inner + 2 * out.numel() + 64 * num_rows + (1 << 20)
    for mine, theirs in zip((out, *torch.autograd.grad(out, (x, weights), grad)), wanted, strict=True):
        assert (mine - theirs).norm() <= 1e-2 * theirs.norm()


def test_each_kernel_matches_its_twin() -> None:
    # Catches offsets beyond 2^31 elements and a choice of experts that depends on the device.
    num_tokens, num_choices, width = 180_000, 8, 1536
    scores = torch.rand(num_tokens, 16, device="cuda").mul(8).round()
    ids = top_experts(scores, num_choices)
    assert torch.equal(ids.cpu(), top_experts(scores.cpu(), num_choices))
    plan = RoutePlan.of(ids, 16)
    y = torch.empty(len(plan.choices), width, dtype=torch.bfloat16, device="cuda").normal_()
    assert y.numel() > 2**31
    weights = torch.rand(num_tokens, num_choices, device="cuda")
    expected = rows.combine(y, weights, plan.rows, plan.ends)
    torch.testing.assert_close(rows_triton.combine(y, weights, plan.rows, plan.ends), expected)


def test_routes_are_summed_as_on_a_cpu() -> None:
    # Catches sums that differ between two runs, and a kernel that the interpreter does not show to be wrong.
    num_tokens, num_experts = 100_000, 128
    logits = torch.randn(num_tokens, num_experts, device="cuda")
    cu_seqlens = torch.tensor([0, 7, 7, 40_000, num_tokens], dtype=torch.int32, device="cuda")
    given = logits, logits.softmax(-1), top_experts(logits, 8), cu_seqlens, torch.tensor(num_tokens - 99, device="cuda")
    grads = torch.randn(4, num_experts, device="cuda"), torch.randn(4, device="cuda")

    def run(*given: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in given[:2]]
        sums = sum_routing(leaves[0], leaves[1], *given[2:])
        return [*sums, *torch.autograd.grad(sums[1:], leaves, [grad.to(given[0].device) for grad in grads])]

    found = run(*given)
    assert all(torch.equal(one, other) for one, other in zip(found, run(*given), strict=True))
    expected = run(*(tensor.cpu() for tensor in given))
    torch.testing.assert_close([tensor.cpu() for tensor in found], expected)
