"""Weights over NCCL from a trainer's GPU to a receiver's: bytes, memory, and a trainer that outlives its receivers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import started_engines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: a trainer's and a receiver's"),
]

TRAINER = Path(__file__).parents[1] / "support" / "sync_trainer.py"
ON_SECOND = ["--device", "cuda:1"]


def trained(*ports: int, bucket_s: float = 30.0, in_fp8: bool = False) -> dict[str, Any]:
    """What the trainer says after a sync to each port."""
    command = [sys.executable, str(TRAINER), *map(str, ports), "--bucket-s", str(bucket_s)]
    command += ["--block-fp8"] if in_fp8 else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("dtypes", [{"bfloat16"}, {"bfloat16", "float8_e4m3fn", "float32"}], ids=["bf16", "block fp8"])
def test_a_receiver_gets_the_bytes_of_the_weights_again_and_again(dtypes: set[str]) -> None:
    # Catches broadcasts of a buffer that is not filled yet or is filled again, and groups that are not left.
    with started_engines(ON_SECOND) as (engine,):
        said = trained(engine.port, engine.port, engine.port, in_fp8=len(dtypes) > 1)
        seen = engine.seen()
    for sync in said["syncs"]:
        assert sync["outcome"]["receivers"][0]["success"], sync
        # Two buckets, a parameter that is gathered, the same cast and taken apart, and what NCCL does not count.
        assert sync["peak"] <= 2 * max(said["bucket"], said["largest"]) + 4 * said["largest"], sync
    assert {name: tensor["sha256"] for name, tensor in seen["tensors"].items()} == said["wanted"]
    assert {tensor["dtype"] for tensor in seen["tensors"].values()} == dtypes
    assert len(seen["order"]) == 3 * len(said["wanted"])
    assert (seen["version"], seen["is_paused"], seen["groups"]) == ("7", False, [])
    assert said["gradients_kept"]


FAULTS = {
    # fault: (its argument, the bucket at which it shows, the longest that the sync may take)
    "dies before it joins": ("--die-at-bucket", 0, 60.0),
    "dies before a bucket": ("--die-at-bucket", 2, 30.0),
    "dies after a bucket": ("--die-after-bucket", 2, 30.0),
    "hangs at the first": ("--hang-at-bucket", 0, 60.0),
    "hangs": ("--hang-at-bucket", 2, 60.0),
    "refuses a bucket": ("--refuse-bucket", 2, 30.0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_trainer_outlives_a_receiver(fault: str) -> None:
    # Catches a broadcast that holds the GPU, or a process that torch ends, because a receiver is gone.
    argument, bucket, limit_s = FAULTS[fault]
    with started_engines([*ON_SECOND, argument, str(bucket)], ON_SECOND) as (failing, sound):
        said = trained(failing.port, sound.port, bucket_s=10.0)
        first, second = said["syncs"]
        (receiver,) = first["outcome"]["receivers"]
        assert (receiver["success"], receiver["weights"]) == (False, "mixed"), first
        assert first["seconds"] < limit_s, first
        assert first["computed_s"] < 10.0, first
        assert second["outcome"]["receivers"][0]["success"], second
        hashes = {name: tensor["sha256"] for name, tensor in sound.seen()["tensors"].items()}
    assert hashes == said["wanted"]
    assert said["gradients_kept"]
