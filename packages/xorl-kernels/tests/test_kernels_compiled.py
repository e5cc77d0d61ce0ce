"""All Triton kernels pass the compiler, as they are launched, in every variant; hopper_compiled.py has the cases."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("hopper_compiled.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform")
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    # Catches, without a GPU, what the interpreter runs and the compiler refuses, and what would make it slow.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(CASES)]
    environment = {**os.environ, "PYTEST_ADDOPTS": "", "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=environment)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
