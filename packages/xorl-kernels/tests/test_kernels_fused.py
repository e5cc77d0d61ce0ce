"""The Triton kernels on a CPU: in Triton's interpreter, which has to be chosen before Triton is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

LONGEST = Path(__file__).with_name("triton_interpreted.py")
OTHERS = sorted(set(Path(__file__).parent.glob("*_interpreted.py")) - {LONGEST})


@pytest.mark.parametrize("cases", [[LONGEST], OTHERS], ids=["longest", "others"])
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform")
def test_kernels_match_their_twins_in_the_interpreter(cases: list[Path]):
    """Catches a kernel whose mathematics, codes, scales or borders are wrong, without a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=environment)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
