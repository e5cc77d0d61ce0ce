"""The choice between copy engines and NCCL, as a function of measured times."""

from __future__ import annotations

import logging

import pytest

from xorl.core.parallel.collectives import Times, log


@pytest.mark.parametrize(
    ("copy_engine", "nccl", "choice"),
    [
        ([215, 215, 214, 215], [225, 225, 225, 225], "copy_engine"),
        ([480, 470, 475, 470], [225, 225, 225, 225], "nccl"),  # the collapse of copy engines
        ([100, 480, 100, 100], [225, 225, 225, 225], "nccl"),  # on one rank, for which all others wait
        ([250, 250, 260, 250], [225, 225, 225, 225], "copy_engine"),  # within what measurements differ by
    ],
)
def test_the_transport_whose_slowest_rank_is_done_first_is_chosen(
    copy_engine: list[float], nccl: list[float], choice: str
) -> None:
    # Catches a choice by an average, by one rank alone, and one that changes from run to run with noise.
    assert Times([190, 191, 190, 189], copy_engine, nccl).choice == choice


@pytest.mark.parametrize(
    ("products", "slow"),
    [([190, 192, 189, 190], None), ([190, 191, 370, 189], 2), ([200, 400], 1), ([400, 390, 200, 410], None)],
)
def test_a_rank_that_all_others_wait_for_is_named(
    products: list[float], slow: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    # Catches a slow GPU that is taken for slow communication, and local ranks in place of global ones.
    caplog.set_level(logging.INFO, logger="xorl.core.parallel.collectives")
    times = Times(products, [500] * len(products), [490] * len(products))
    assert times.slow_rank == slow
    log(times, range(8, 8 + len(products)))
    choice, *warnings = [record.getMessage() for record in caplog.records]
    assert choice.startswith("fsdp_collectives: copy_engine was chosen; a layer's products took 500.0 ms beside")
    assert [warning.split(" takes")[0] for warning in warnings] == ([] if slow is None else [f"rank {8 + slow}"])
