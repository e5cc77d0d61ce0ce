"""The tables of rates behind plans: what is between the measured points, and what is refused."""

import math

import pytest
import torch

from xorl.train.plan.operations import Recorder
from xorl.train.plan.rates import Curve, cards, rates_of


@pytest.mark.parametrize("card", cards())
def test_every_table_can_be_read_and_rates_are_between_the_measured_ones(card: str) -> None:
    # Catches a table that the tool wrote in another form, and an interpolation that leaves the range of its points.
    rates = rates_of(card)
    assert rates.card == card
    assert rates.records.keys() >= {"one GPU", "several GPUs"}
    for dtype, table in rates.products.items():
        measured = [tflops for plane in table for row in plane for tflops in row]
        for sizes in ((3, 5, 7), (1000, 3000, 5000), (10**6, 10**6, 10**6)):
            tflops = 2e-12 * math.prod(sizes) / rates.product_s(*sizes, dtype)
            assert min(measured) * 0.999 <= tflops <= max(measured) * 1.001
    first, last = rates.sizes["bf16"][0], rates.sizes["bf16"][-1]
    assert rates.product_s(int(last), int(last), int(last), "bf16") > rates.product_s(int(first), 512, 512, "bf16")


def test_points_are_met_and_those_between_are_on_a_line_of_logarithms() -> None:
    # Catches weights that are swapped.
    curve = Curve((1.0, 4.0, 16.0), (10.0, 40.0, 40.0))
    assert [curve.at(point) for point in (0.1, 1, 2, 4, 8, 99)] == pytest.approx([10, 10, 20, 40, 40, 40])


def test_a_collective_takes_longer_with_more_bytes_and_none_on_one_rank() -> None:
    # Catches bytes that stay on a rank and are counted as sent.
    links = rates_of("h100").links
    assert links.seconds("all_gather", 1, 1e9) == 0
    assert 0 < links.seconds("all_gather", 2, 1e8) < links.seconds("all_gather", 2, 1e9)


def test_an_unknown_card_names_the_known_ones() -> None:
    # Catches a KeyError for a card that nobody has measured.
    with pytest.raises(ValueError, match=r"--gpu b300: its rates have not been measured; known: h100, h200"):
        rates_of("b300")


def test_operations_are_recorded_with_what_they_multiply_and_move() -> None:
    # Catches products that are counted as nothing, views that count as work, and results that nobody holds any more.
    with (recorder := Recorder([4])) as meter:
        meter.restart()
        x, weight = torch.ones(4, 8), torch.ones(16, 8)
        y = x @ weight.t()
        held = meter.held()
        del y
        z = x.view(8, 4) + 1
    products = [each for each in recorder.phases[-1] if each.kind == "products"]
    assert [(each.flops, each.num_bytes) for each in products] == [(2 * 4 * 8 * 16, 4 * (4 * 8 + 8 * 16 + 4 * 16))]
    assert held - meter.held() == 4 * (4 * 16 - 4 * 8)
    assert meter.peak() == held
    assert len(recorder.phases[-1]) == 4, "two tensors of ones, a product and an addition"
    assert z.shape == (8, 4)
