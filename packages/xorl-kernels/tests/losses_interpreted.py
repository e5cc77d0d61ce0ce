"""Cross-entropy in Triton's interpreter; run by test_kernels_fused.py."""

import pytest
import torch

from xorl.kernels.fused import cross_entropy, reference
from xorl.kernels.testing import TOLERANCES, assert_close, mend_interpreter, nan_poisoned_empty

mend_interpreter()

DTYPES = [torch.float32, torch.float16]


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def loss_of(num_rows, dtype=torch.float32):
    return reference.RowLosses.empty(num_rows, dtype, torch.device("cpu"))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "stride", "last"),
    [(1, 2, 2, 0), (5, 37, 64, 0), (3, 8192, 8192, 0), (2, 10_001, 10_048, 30), (2, 10_001, 10_048, 60)],
)
@pytest.mark.parametrize("gradient_dtype", [None, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_cross_entropy_rows(num_rows, num_columns, stride, last, dtype, weighted, gradient_dtype, softcap):
    # Catches wrong block boundaries, a gradient that overwrites logits before they are read (None: in place), padded
    # rows, a last block with much larger logits than the first, and a cap without its derivative.
    buffer = torch.full((num_rows, stride), float("nan"), dtype=dtype)
    logits = buffer[:, :num_columns]
    logits.copy_(4 * randn(num_rows, num_columns))
    labels = torch.randint(num_columns, (num_rows,), generator=torch.Generator().manual_seed(1))
    if num_rows > 1:
        labels[1] = -100
        labels[0] = logits[0].argmax()
    logits[0, -1] += last
    token_weight = randn(num_rows) if weighted else None
    wanted_gradient = torch.empty(num_rows, num_columns, dtype=torch.float64)
    wide_weight = None if token_weight is None else token_weight.double()
    wanted = loss_of(num_rows, torch.float64)
    reference.cross_entropy_rows(logits.double(), labels, wide_weight, wanted_gradient, wanted, softcap)
    with nan_poisoned_empty():
        gradient = logits[:] if gradient_dtype is None else torch.empty(num_rows, num_columns, dtype=gradient_dtype)
        found = loss_of(num_rows)
        cross_entropy.cross_entropy_rows(logits, labels, token_weight, gradient, found, softcap)
    assert_close("loss", found.loss, wanted.loss, TOLERANCES[torch.float32])
    assert torch.equal(found.correct, wanted.correct)
    product = (gradient.double() * found.scale[:, None]).to(gradient.dtype)
    assert_close("gradient", product, wanted_gradient * wanted.scale[:, None], TOLERANCES[gradient.dtype])
    assert bool(buffer[:, num_columns:].isnan().all())
    if gradient_dtype is not None:
        known = labels.clamp(min=0)[:, None]
        at_label = gradient.gather(1, known).double() * found.scale[:, None] + found.label_error[:, None]
        exact = wanted_gradient.gather(1, known) * wanted.scale[:, None]
        assert_close("the label's element", at_label, exact, TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_columns", "stride", "last"), [(37, 64, 0), (10_001, 10_048, 30), (10_001, 10_048, 60)])
@pytest.mark.parametrize("gradient_dtype", [None, torch.float16, torch.float32, "no gradient"], ids=str)
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_cross_entropy_part(num_columns, stride, last, dtype, gradient_dtype, softcap):
    # Catches a label of another rank that is read from the row, and values that belong to the whole vocabulary.
    logits = torch.full((4, stride), float("nan"), dtype=dtype)[:, :num_columns]
    logits.copy_(4 * randn(4, num_columns))
    logits[0, -1] += last
    labels = torch.tensor([num_columns - 1, -1, -100, 0])
    wanted, found = (
        reference.PartLosses.empty(4, each, torch.device("cpu")) for each in (torch.float64, torch.float32)
    )
    exact = torch.empty(4, num_columns, dtype=torch.float64)
    reference.cross_entropy_part(logits.double(), labels, exact, wanted, softcap)
    with nan_poisoned_empty():
        gradient = logits[:] if gradient_dtype is None else None
        if isinstance(gradient_dtype, torch.dtype):
            gradient = torch.empty(4, num_columns, dtype=gradient_dtype)
        cross_entropy.cross_entropy_part(logits, labels, gradient, found, softcap)
    trained = labels != -100
    for name in ("log_sum", "target", "largest", "before"):
        got, exact_values = (getattr(one, name)[trained].double() for one in (found, wanted))
        torch.testing.assert_close(got, exact_values, rtol=1e-5, atol=1e-5, msg=name)  # some are infinite
    if gradient is not None:
        # The shift is any number; exp(logit - shift) must follow from it.
        factor = (found.shift.double() - wanted.shift).exp().where(trained, 1.0)[:, None]
        assert_close("gradient", gradient.double() * factor, exact, TOLERANCES[gradient.dtype])
        assert torch.equal(found.rounded[0], gradient[0, -1].float())
        assert torch.equal(found.rounded[3], gradient[3, 0].float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "width", "num_labels"), [(1, 3, 2), (90, 700, 4), (40, 16, 100)])
def test_rows_are_added_at_their_labels(num_rows, width, num_labels, dtype):
    # Catches runs of a label that end or continue at the boundary of a block of rows, and labels out of range.
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(-1, num_labels + 1, (num_rows,), generator=generator)
    rows, factors = randn(num_rows, width, dtype=dtype), randn(num_rows, seed=3)
    wanted = randn(num_labels, width, seed=4)
    found = wanted.clone()
    reference.add_at_labels_(wanted, rows, labels, factors)
    cross_entropy.add_at_labels_(found, rows, labels, factors)
    assert_close("sums", found, wanted, TOLERANCES[torch.float32])
    assert found.isfinite().all()


def test_cross_entropy_rows_without_gradient_leaves_the_logits_alone():
    # Catches an evaluation that overwrites its logits.
    logits = randn(3, 50)
    before = logits.clone()
    cross_entropy.cross_entropy_rows(logits, torch.tensor([1, -100, 49]), None, None, loss_of(3))
    assert torch.equal(logits, before)


def test_of_equal_logits_the_first_is_the_prediction():
    # Catches an accuracy of 1 for a model whose logits are all equal.
    labels = torch.tensor([0, 1, 9999])
    found = loss_of(3)
    cross_entropy.cross_entropy_rows(torch.zeros(3, 10_000), labels, None, None, found)
    assert found.correct.tolist() == [True, False, False]


def test_a_vocabulary_masked_with_infinities_and_a_label_outside_of_it():
    # Catches NaN from lanes whose logits are all -inf, and a label that reads memory beyond its row.
    logits = torch.full((2, 10_000), float("-inf"))
    logits[:, 9500:9502] = 0.0
    gradient, found = torch.empty_like(logits), loss_of(2)
    cross_entropy.cross_entropy_rows(logits, torch.tensor([9501, 10_000]), None, gradient, found)
    gradient *= found.scale[:, None]
    assert found.loss[0].item() == pytest.approx(0.6931472)
    assert gradient[0].nonzero().flatten().tolist() == [9500, 9501]
    assert found.loss[1].isnan()
    assert gradient[1].isnan().all()
    assert found.correct.tolist() == [False, False]
