"""The service's workers on one and two GPUs: compiled, in bf16, over NCCL, beside one CPU in fp32."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parents[1] / "support" / "worker_script.py"


def found_on(folder: Path, device_type: str, num_ranks: int) -> dict[str, dict]:
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    result = subprocess.run(
        [sys.executable, *ranks, str(SCRIPT), str(folder), device_type],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_models_learn_the_same_on_gpus(tmp_path: Path) -> None:
    # Catches collectives of the host that a group of GPUs cannot do, kernels and compiled layers that a bank or
    # generation does not fit, and ranks that part.
    wanted = found_on(tmp_path, "cpu", 1)
    for num_gpus in (1, 2):
        if torch.cuda.device_count() < num_gpus:
            continue
        got = found_on(tmp_path, "cuda", num_gpus)
        for kind, reference in wanted.items():
            for name in ("first", "second", "third"):
                assert got[kind][name] == pytest.approx(reference[name], rel=0.02), (kind, name)
            for name in ("norm", "norm_after"):
                assert got[kind][name] == pytest.approx(reference[name], rel=0.1), (kind, name)
            assert got[kind]["sampled"] == pytest.approx(got[kind]["trained"], abs=0.15)
