"""A worker's weights at an inference endpoint: what an export holds, and nothing of training is touched."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from composites import read_folder, read_json, write_composite
from engines import described, fake_engines
from tiny_models import hf_config
from worker_ranks import datum, done, refusal_of, service_config, train, worker_of
from xorl.kernels.quant.block_fp8 import quantize_block_fp8
from xorl.server import operations as ops
from xorl.server.identifiers import CheckpointRef, checkpoint_folder

EXPERTS = hf_config("glm4_moe", num_hidden_layers=3, moe_intermediate_size=32)
QLORA = {"enable_lora": True, "lora_rank": 4, "enable_qlora": True, "quant_format": "nf4", "quant_group_size": 16}
KINDS: dict[str, dict[str, object]] = {
    "full": {},
    "experts": {"shape": EXPERTS},
    "lora": {"enable_lora": True, "lora_rank": 4},
    "qlora": QLORA,
    "qlora-experts": {**QLORA, "shape": EXPERTS, "expert_parallel_size": 2},
}
SHARDED = {"data_parallel_shard_size": 2}
ADAPTER = ops.LoraSpec(rank=3, alpha=8.0, seed=5)


def exported(folder: Path) -> dict[str, dict[str, object]]:
    """What an endpoint should have been sent, by the files of an export."""
    return described(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("kind", KINDS)
def test_an_endpoint_gets_what_an_export_holds_and_gradients_stay(
    kind: str, tmp_path: Path, run_ranks: Callable
) -> None:
    # Catches a base that is sent without its client's adapter or with another client's, experts that are sent as one
    # tensor, a gradient that a sync drops or counts twice, and an endpoint that fails a training run.
    def after_step(name: str, *between: ops.SyncWeights) -> ops.SyncResult | None:
        """Trains, sends weights while a gradient waits, steps on it, and exports the model before and after."""
        worker = worker_of(service_config(tmp_path, output_dir=str(tmp_path / name), **SHARDED, **KINDS[kind]))
        done(worker, ops.CreateModel("a", lora=ADAPTER))
        if "enable_lora" in KINDS[kind]:
            done(worker, ops.CreateModel("b", lora=ADAPTER))
        done(worker, *train("a", [datum(9, 1), datum(14, 2)]))
        done(
            worker,
            ops.ForwardBackward("a", [datum(11, 3)], "cross_entropy"),
            ops.SaveFullWeights("a", "before", "float32"),
        )
        refusal_of(worker, ops.SyncWeights("a", endpoints=()))
        result = done(worker, *between) if between else None
        done(worker, ops.OptimStep("a", 1e-2), ops.SaveFullWeights("a", "after", "float32"))
        return result if isinstance(result, ops.SyncResult) else None

    with fake_engines([], ["--refuse-bucket", "0"]) as engines:
        endpoints = tuple(ops.Endpoint("127.0.0.1", engine.port) for engine in engines)
        sync = ops.SyncWeights("a", endpoints, weight_version="a-1", buffer_size_mb=1)
        result, _ = run_ranks(lambda: after_step("with", sync), 2)
        seen = engines[0].seen()
    run_ranks(lambda: after_step("without"), 2)
    assert not result.success, result
    assert result.weight_version == seen["version"] == "a-1"
    assert [one.success for one in result.endpoints] == [True, False]
    assert result.endpoints[0].weights == "new"
    folders = {
        (run, name): checkpoint_folder(tmp_path / run, CheckpointRef("a", "external_weights", name))
        for run in ("with", "without")
        for name in ("before", "after")
    }
    assert seen["tensors"] == exported(folders["with", "before"])
    assert ("model.layers.2.mlp.experts.3.down_proj.weight" in seen["tensors"]) == ("experts" in kind)
    assert exported(folders["with", "after"]) == exported(folders["without", "after"])
    assert exported(folders["with", "after"]) != exported(folders["with", "before"])


def test_the_text_model_of_a_composite_is_sent_and_exported_under_the_names_of_its_folder(
    tmp_path: Path, run_ranks: Callable
) -> None:
    # Catches names that an engine does not find in its model, and a service whose exports lack the vision tower.
    base = write_composite("gemma3", tmp_path / "base")

    def run(port: int) -> ops.SyncResult:
        worker = worker_of(service_config(tmp_path, shape=read_json(base), model_path=str(base), **SHARDED))
        done(worker, ops.CreateModel("a"), *train("a", [datum(9, 1), datum(14, 2)]))
        done(worker, ops.SaveFullWeights("a", "e", "float32"))
        return done(worker, ops.SyncWeights("a", (ops.Endpoint("127.0.0.1", port),), buffer_size_mb=1))

    with fake_engines([]) as (engine,):
        result, _ = run_ranks(lambda: run(engine.port), 2)
        seen = engine.seen()["tensors"]
    assert result.success, result
    found = read_folder(checkpoint_folder(tmp_path / "outputs", CheckpointRef("a", "external_weights", "e")))
    read = read_folder(base)
    assert found.keys() == read.keys()
    changed = {name for name in read if not torch.equal(found[name], read[name])}
    assert changed == {name for name in read if name.startswith("language_model.model.")}
    assert seen == described({name: found[name] for name in changed})


@pytest.mark.parametrize(
    ("options", "lora"),
    [({**SHARDED, **QLORA}, ADAPTER), ({"pipeline_parallel_size": 2}, None)],
    ids=["qlora", "stages"],
)
def test_weights_are_sent_in_block_fp8(
    options: dict[str, object], lora: ops.LoraSpec | None, tmp_path: Path, run_ranks: Callable
) -> None:
    # Catches scales under a wrong name or of other blocks, a module that is quantised although it was excluded, and an
    # embedding, a head, a norm or a router that is, and experts that are not, or layers of another stage.
    def run(port: int) -> ops.SyncResult:
        worker = worker_of(service_config(tmp_path, shape=EXPERTS, **options))
        done(worker, ops.CreateModel("a", lora=lora), *train("a", [datum(9, 1), datum(14, 2)]))
        done(worker, ops.SaveFullWeights("a", "e", "float32"))
        form = ops.BlockFp8(("lm_head", "o_proj", "model.layers.1.mlp"))
        result = done(
            worker, ops.SyncWeights("a", (ops.Endpoint("127.0.0.1", port),), buffer_size_mb=1, quantization=form)
        )
        return result

    with fake_engines([]) as (engine,):
        result, _ = run_ranks(lambda: run(engine.port), 2)
        seen = engine.seen()["tensors"]
    assert result.success, result
    folder = checkpoint_folder(tmp_path / "outputs", CheckpointRef("a", "external_weights", "e"))
    wanted: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight").rpartition(".")[2]
        if not module.endswith("_proj") or module == "o_proj" or ".layers.1.mlp." in name:
            wanted[name] = tensor
        else:
            wanted[name], wanted[f"{name}_scale_inv"] = quantize_block_fp8(tensor, 128)
    assert "model.layers.2.mlp.experts.3.up_proj.weight_scale_inv" in wanted
    assert seen == described(wanted)
    assert {one["dtype"] for one in seen.values()} == {"float8_e4m3fn", "float32"}
