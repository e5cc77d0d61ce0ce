"""Casts to fp8 and products of fp8 matrices: exact scales, known errors, and kernels that do what their twins do."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from xorl.kernels.quant import fp8

# Half the distance of neighbouring numbers: relative to normal ones, and of subnormal ones.
RELATIVE = {fp8.E4M3: 2.0**-4, fp8.E5M2: 2.0**-3}
SUBNORMAL = {fp8.E4M3: 2.0**-10, fp8.E5M2: 2.0**-17}


def matrix(num_rows, num_columns, seed=0, dtype=torch.bfloat16):
    """Numbers over many powers of two, as gradients are."""
    generator = torch.Generator().manual_seed(seed)
    normal, spread = torch.randn(2, num_rows, num_columns, generator=generator)
    return (normal * (2 * spread).exp()).to(dtype)


def error_bound(x, descale, fp8_dtype):
    """The largest error of each value of x: half a unit in the last place of fp8."""
    return torch.maximum(RELATIVE[fp8_dtype] * x.abs(), SUBNORMAL[fp8_dtype] * descale)


@pytest.mark.parametrize("fp8_dtype", [fp8.E4M3, fp8.E5M2], ids=str)
def test_scale_is_the_largest_power_of_two_that_fits(fp8_dtype):
    # Catches overflow, a bit of range given away, and scales that round.
    top = torch.finfo(fp8_dtype).max
    for largest in (1.0, 1.75, 1.7500001, 1.9999, 3e-30, 5e30, top, 1.1 * top):
        x = torch.tensor([[largest, 0.0]])
        q, descale = fp8.cast_tensorwise(x, fp8.amax(x), fp8_dtype)
        assert torch.frexp(descale).mantissa.item() == 0.5
        assert largest <= top * descale.item() < 2 * largest
        assert (q.float()[0, 0] * descale).item() == pytest.approx(largest, rel=RELATIVE[fp8_dtype])


@pytest.mark.parametrize("fp8_dtype", [fp8.E4M3, fp8.E5M2], ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (40, 48), (129, 32)], ids=str)
def test_casts_give_the_values_back_within_half_a_unit(shape, fp8_dtype):
    # Catches scales applied along the wrong axis, values that overflow, and a transposed copy of other values.
    x = matrix(*shape)
    wide, rows = x.double(), shape[0]
    q, q_t, descale = fp8.cast_tensorwise_both(x, fp8.amax(x), fp8_dtype)
    assert torch.equal(q.float(), q_t.float().t()[:rows])
    assert bool(((q.double() * descale - wide).abs() <= error_bound(wide, descale, fp8_dtype)).all())
    q, row_descale, q_t, column_descale = fp8.cast_axiswise(x, fp8_dtype)
    row_descale = row_descale[:, None]
    assert bool(((q.double() * row_descale - wide).abs() <= error_bound(wide, row_descale, fp8_dtype)).all())
    back = q_t.double().t()[:rows] * column_descale
    assert bool(((back - wide).abs() <= error_bound(wide, column_descale, fp8_dtype)).all())
    assert not q_t[:, rows:].float().any()
    assert q_t.shape == (shape[1], -rows % 16 + rows)


def test_a_tensor_of_zeros_and_one_that_is_not_finite():
    # Catches NaN from dividing by a largest value of zero, and infinities that saturate and are never seen again.
    for cast in (lambda x: fp8.cast_tensorwise(x, fp8.amax(x), fp8.E4M3), lambda x: fp8.cast_rowwise(x, fp8.E4M3)):
        q, descale = cast(torch.zeros(16, 16))
        assert not (q.float() * descale).any()
        assert descale.isfinite().all()
        for value in (float("inf"), float("nan")):
            x = torch.ones(16, 16)
            x[2, 3] = value
            q, descale = cast(x)
            product = fp8.scaled_mm(q, q, descale, descale, out_dtype=torch.float32, fast_accumulation=True)
            assert not product[2].isfinite().any()


@pytest.mark.parametrize("rowwise", [False, True])
def test_product_is_off_by_no_more_than_its_operands(rowwise):
    # Catches a scale that is applied to the wrong operand or axis, or twice.
    a, b = matrix(40, 64, dtype=torch.float32), matrix(48, 64, seed=1, dtype=torch.float32)
    cast = (
        (lambda x: fp8.cast_rowwise(x, fp8.E4M3))
        if rowwise
        else (lambda x: fp8.cast_tensorwise(x, fp8.amax(x), fp8.E4M3))
    )
    (a_q, a_descale), (b_q, b_descale) = cast(a), cast(b)
    product = fp8.scaled_mm(a_q, b_q, a_descale, b_descale, out_dtype=torch.float32, fast_accumulation=False)
    wide_a, wide_b = a.double(), b.double()
    a_error = error_bound(wide_a, a_descale[:, None] if rowwise else a_descale, fp8.E4M3)
    b_error = error_bound(wide_b, b_descale[:, None] if rowwise else b_descale, fp8.E4M3)
    # |a'b' - ab| <= |a' - a| |b| + |a'| |b' - b|, and fp32 adds a little of the sum of magnitudes.
    bound = a_error @ wide_b.abs().t() + (wide_a.abs() + a_error) @ b_error.t()
    bound += 1e-5 * (wide_a.abs() @ wide_b.abs().t())
    assert bool(((product - wide_a @ wide_b.t()).abs() <= bound).all())
    exact = (a_q.double() * (a_descale[:, None] if rowwise else a_descale)) @ (
        b_q.double() * (b_descale[:, None] if rowwise else b_descale)
    ).t()
    torch.testing.assert_close(product.double(), exact, rtol=1e-5, atol=1e-5 * exact.abs().max().item())


@pytest.mark.parametrize("shape", [(40, 48), (32, 16)], ids=str)
def test_operators_describe_their_results_to_a_compiler(shape):
    # Catches a fake kernel of another shape, dtype or layout than the operator, which a compiled graph trusts.
    x = matrix(*shape)
    q, _ = fp8.cast_tensorwise(x, fp8.amax(x), fp8.E4M3)
    calls = [
        (fp8.amax, (x,)),
        (fp8.cast_tensorwise, (x, fp8.amax(x), fp8.E4M3)),
        (fp8.cast_tensorwise_both, (x, fp8.amax(x), fp8.E5M2)),
        (fp8.cast_rowwise, (x, fp8.E4M3)),
        (fp8.cast_columnwise, (x, fp8.E4M3)),
        (fp8.cast_axiswise, (x, fp8.E5M2)),
        (fp8.transpose, (q,)),
    ]
    for operator, arguments in calls:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = operator(*tree_map_only(torch.Tensor, mode.from_tensor, arguments))
        for one, other in zip(tree_leaves(fake), tree_leaves(operator(*arguments)), strict=True):
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def test_devices_that_cannot_are_refused():
    # Catches an error from within a library in place of one that says what the machine lacks.
    assert fp8.fp8_refusal(torch.device("cpu")) is None
    assert "not on mps" in str(fp8.fp8_refusal(torch.device("mps")))
