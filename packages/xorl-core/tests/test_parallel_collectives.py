"""The choice between copy engines and NCCL, as a function of measured times and of the choice before a restart."""

import logging

import pytest

from xorl.core.parallel import collectives
from xorl.core.parallel.collectives import Collectives, Times, Transport, choices, decided, keep_choices, log


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


@pytest.mark.parametrize(
    ("option", "before", "can_use", "is_deterministic", "expected"),
    [
        ("auto", None, True, False, None),  # measured
        ("auto", "nccl", True, False, "nccl"),
        ("auto", "copy_engine", True, False, "copy_engine"),
        ("auto", "nccl", True, True, "copy_engine"),
        ("auto", "copy_engine", False, False, "nccl"),  # resumed on other hardware
        ("nccl", "copy_engine", True, False, "nccl"),
        ("copy_engine", "nccl", True, False, "copy_engine"),
    ],
)
def test_a_choice_from_before_a_restart_is_kept_unless_the_option_names_another(
    option: Collectives, before: Transport | None, can_use: bool, is_deterministic: bool, expected: Transport | None
) -> None:
    """Catches a restart that measures again, whose other choice would change the last bit of every sum."""
    assert decided(option, before, can_use=can_use, is_deterministic=is_deterministic) == expected


def test_copy_engines_that_cannot_be_used_are_refused_by_name() -> None:
    """Catches a silent fallback to NCCL."""
    with pytest.raises(ValueError, match="copy_engine needs GPUs of one host"):
        decided("copy_engine", "copy_engine", can_use=False, is_deterministic=False)


def test_choices_are_kept_as_they_were_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a record that cannot be read back, or one of another form that is ignored."""
    monkeypatch.setattr(collectives, "_chosen", {})
    keep_choices({"0,1": "nccl", "2,3": "copy_engine"})
    assert choices() == {"0,1": "nccl", "2,3": "copy_engine"}
    for damaged in ({"0,1": "gloo"}, {"all": "nccl"}, {"": "nccl"}):
        with pytest.raises(ValueError, match="is not a transport of ranks"):
            keep_choices(damaged)
