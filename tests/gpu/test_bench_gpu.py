"""`xorl bench` on GPUs: figures that only a GPU has, and the peers that are installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
PEERS = ("transformers", "transformers-liger", "transformers-liger-fa4", "transformers-compile")


def bench(folder: Path, *arguments: str) -> dict:
    command = [sys.executable, "-m", "xorl.cli.bench", "--model", "tiny", "--seq", "1024", "--output", str(folder)]
    result = subprocess.run(
        [*command, "--steps", "4", "--warmup", "2", "--rounds", "2", *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads((folder / "bench.json").read_text())


@pytest.mark.parametrize("documents", ["single", "packed"])
def test_every_installed_peer_runs_in_turn_with_xorl(documents: str, tmp_path: Path) -> None:
    # Catches a peer whose kernels do not take the batches, and one that is dropped without a word.
    record = bench(tmp_path, "--documents", documents, "--peers", ",".join(PEERS), "--profile", "--nproc-per-node", "1")
    assert list(record["systems"]) == ["xorl", *(peer for peer in PEERS if peer not in record["absent"])]
    for name, reason in record["absent"].items():
        assert ("liger" in name and "liger" in reason) or ("fa4" in name and "flash_attention_4" in reason)
    for name, system in record["systems"].items():
        assert len(system["rounds"]) == 2
        assert 0 < system["peak_allocated_gib"] <= system["peak_reserved_gib"]
        losses = [step["loss"] for step in system["rounds"][0]]
        assert losses == pytest.approx([6.24] * len(losses), abs=0.3), name  # log of the vocabulary
    kernels = record["kernels"]
    assert kernels["device"] == "cuda"
    assert 0 < kernels["busy_ms"] <= kernels["span_ms"]
    assert record["environment"]["driver"]


def test_two_gpus_share_one_group_with_a_peer(tmp_path: Path, two_gpus) -> None:
    # Catches builds that are not let go, and a peer that is not sharded as xorl is.
    record = bench(tmp_path, "--nproc-per-node", "2", "--peers", "transformers")
    assert record["work"]["num_ranks"] == 2
    assert record["ratios"]["transformers"]["ratio"] > 0
