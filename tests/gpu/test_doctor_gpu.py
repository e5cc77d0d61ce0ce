"""`xorl doctor` on GPUs: what works is called so."""

from pathlib import Path

import pytest
import torch

from xorl.train.doctor import findings

pytestmark = pytest.mark.gpu


def test_a_machine_that_works_has_no_failures(tmp_path: Path) -> None:
    # Catches a check that only passes without GPUs.
    found = list(findings(tmp_path))
    assert not [str(each) for each in found if each.status == "fail"]
    assert {f"gpu {index}" for index in range(torch.cuda.device_count())} <= {each.part for each in found}
