"""A worker's weights at an inference endpoint: what an export holds, and nothing of training is touched."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engines import fake_engines
from worker_ranks import ask, datum, done, service_config, train, worker_of
from xorl.server.messages import (
    CreateModel,
    Endpoint,
    Failure,
    ForwardBackward,
    LoraSpec,
    OptimStep,
    SaveFullWeights,
    SyncResult,
    SyncWeights,
)
from xorl.server.names import CheckpointRef, checkpoint_folder

KINDS: dict[str, dict[str, object]] = {
    "full": {},
    "lora": {"enable_lora": True, "lora_rank": 4},
    "qlora": {"enable_lora": True, "lora_rank": 4, "enable_qlora": True, "quant_format": "nf4", "quant_group_size": 16},
}
SHARDED = {"data_parallel_shard_size": 2}
ADAPTER = LoraSpec(rank=3, alpha=8.0, seed=5)


def exported(folder: Path) -> dict[str, dict[str, object]]:
    """What an endpoint should have been sent, by the files of an export."""
    found: dict[str, dict[str, object]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        shape, digest = list(tensor.shape), hashlib.sha256(data).hexdigest()
        found[name] = {"dtype": str(tensor.dtype)[6:], "shape": shape, "sha256": digest}
    return found


@pytest.mark.multi
@pytest.mark.parametrize("kind", KINDS)
def test_an_endpoint_gets_what_an_export_holds_and_gradients_stay(
    kind: str, tmp_path: Path, run_ranks: Callable
) -> None:
    # Catches a base that is sent without its client's adapter, and a gradient that a sync drops or counts twice.
    def after_step(name: str, *between: SyncWeights) -> SyncResult | None:
        """Trains, sends weights while a gradient waits, steps on it, and exports the model before and after."""
        worker = worker_of(service_config(tmp_path, output_dir=str(tmp_path / name), **SHARDED, **KINDS[kind]))
        done(worker, CreateModel("a", lora=ADAPTER), *train("a", [datum(9, 1), datum(14, 2)]))
        done(worker, ForwardBackward("a", [datum(11, 3)], "cross_entropy"), SaveFullWeights("a", "before", "float32"))
        result = done(worker, *between) if between else None
        done(worker, OptimStep("a", 1e-2), SaveFullWeights("a", "after", "float32"))
        (refused,) = ask(worker, SyncWeights("a", (Endpoint("localhost", 1),), quantization={"quant_method": "fp8"}))
        assert isinstance(refused, Failure)
        assert (refused.status, refused.message.partition(":")[0]) == (400, "quantization")
        return result if isinstance(result, SyncResult) else None

    with fake_engines([]) as (engine,):
        sync = SyncWeights("a", (Endpoint("127.0.0.1", engine.port),), weight_version="a-1", buffer_size_mb=1)
        result, _ = run_ranks(lambda: after_step("with", sync), 2)
        seen = engine.seen()
    run_ranks(lambda: after_step("without"), 2)
    assert result.success, result
    assert result.weight_version == seen["version"] == "a-1"
    assert [(one.weights, one.success) for one in result.endpoints] == [("new", True)]
    folders = {
        (run, name): checkpoint_folder(tmp_path / run, CheckpointRef("a", "external_weights", name))
        for run in ("with", "without")
        for name in ("before", "after")
    }
    assert seen["tensors"] == exported(folders["with", "before"])
    assert exported(folders["with", "after"]) == exported(folders["without", "after"])
    assert exported(folders["with", "after"]) != exported(folders["with", "before"])
