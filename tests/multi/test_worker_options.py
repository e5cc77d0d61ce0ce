"""Options of workers: what they start from, what a step is divided by, how rows are filled, and what is told."""

from pathlib import Path

import pytest
import torch

from placement import whole
from worker_ranks import datum, done, refusal_of, service_config, shards, train, worker_of
from xorl.core.parallel.collectives import Transport, choices, keep_choices
from xorl.server import operations as ops
from xorl.server.identifiers import CheckpointRef
from xorl.server.worker.adapters import AdapterModels
from xorl.server.worker.selftest import self_test
from xorl.server.worker.worker import Worker


@pytest.mark.ranks(1)
def test_a_mean_over_tokens_is_a_sum_over_their_number(tmp_path: Path) -> None:
    # Catches options that nothing reads, a mean of means, and a self-test that leaves something behind.
    data = [[datum(5, 0), datum(9, 1)], [datum(12, 2)]]
    changed = {"grad_normalization": "token_mean", "enable_packing": False, "log_gradient_norms": False}

    def step(**options: object) -> tuple[float, dict[str, float]]:
        worker = worker_of(service_config(tmp_path, enable_lora=True, lora_rank=4, **options))
        if options:
            self_test(worker)
        done(worker, ops.CreateModel("m", lora=ops.LoraSpec(rank=3, seed=5)))
        losses = [done(worker, ops.ForwardBackward("m", call, "cross_entropy")) for call in data]
        update = done(worker, ops.OptimStep("m", 1e-2))
        return sum(one.metrics["loss:sum"] for one in losses if isinstance(one, ops.LossResult)), update.metrics

    loss, plain = step()
    unpacked, divided = step(**changed)
    assert unpacked == pytest.approx(loss, rel=1e-5)
    assert divided["grad_norm"] == pytest.approx(plain["grad_norm"] / (5 + 9 + 12), rel=1e-5)
    assert divided["step"] == 1
    assert [any("/" in name for name in found) for found in (plain, divided)] == [True, False]


@pytest.mark.ranks(1)
def test_adapters_are_on_the_layers_that_are_named_alone(tmp_path: Path) -> None:
    """Catches a service that does not start with layers named by their numbers, and a client that names some."""
    targets = ["0.self_attn.q_proj", "1.mlp.down_proj"]
    asked = {"all": None, "one": ("1.mlp.down_proj",)}

    worker = worker_of(service_config(tmp_path, enable_lora=True, lora_rank=4, lora_target_modules=targets))
    assert isinstance(worker.models, AdapterModels)
    layers = {}
    for name, wanted in asked.items():
        done(worker, ops.CreateModel(name, lora=ops.LoraSpec(target_modules=wanted)), *train(name, [datum(5)]))
        layers[name] = [key.rpartition("layers.")[2] for key in worker.models.bank.adapters(name)]
    assert layers == {"all": targets, "one": targets[1:]}


@pytest.mark.ranks(1)
def test_matrices_under_muon_follow_the_learning_rate_of_the_client(tmp_path: Path) -> None:
    # Catches a rate of matrices that knows nothing of the client's, and one that is hundreds of times what was meant.
    moved = []
    for muon_lr, lr in ((0.02, 5e-5), (0.02, 1e-4), (5e-5, 0.02)):
        worker = worker_of(service_config(tmp_path, optimizer="muon", muon_lr=muon_lr))
        done(worker, ops.CreateModel("m"))
        matrix = worker.base.module.get_parameter("layers.0.self_attn.o_proj.weight")
        before = whole(matrix).clone()
        done(worker, *train("m", [datum(30)], lr))
        moved.append(whole(matrix) - before)
    # An orthogonalised square matrix has about this norm.
    assert moved[0].norm() == pytest.approx(0.02 * 32**0.5, rel=0.3)
    torch.testing.assert_close(moved[1], 2 * moved[0], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(moved[2], moved[0], rtol=1e-4, atol=1e-7)


@pytest.mark.ranks(1)
def test_a_checkpoint_goes_before_the_weights_of_model_path(tmp_path: Path) -> None:
    # Catches a checkpoint that is looked up, and then the other weights are trained.
    def matrix_of(worker: Worker) -> torch.Tensor:
        return whole(worker.base.module.get_parameter("layers.0.self_attn.o_proj.weight")).clone()

    worker = worker_of(service_config(tmp_path))
    done(worker, ops.CreateModel("m"), ops.SaveWeights("m", "first"))
    first = matrix_of(worker)
    done(worker, *train("m", [datum(30)]), ops.SaveFullWeights("m", "later"))
    assert not torch.equal(matrix_of(worker), first)
    outputs = tmp_path / "outputs"
    options: dict[str, object] = {
        "model_path": str(outputs / "external_weights" / "m" / "later"),
        "config_path": None,
        "load_checkpoint_path": str(outputs / "weights" / "m" / "first"),
        "output_dir": str(tmp_path / "others"),
    }
    worker = worker_of(service_config(tmp_path, **options))
    done(worker, ops.CreateModel("m"))
    assert torch.equal(matrix_of(worker), first)


@pytest.mark.ranks(1)
def test_an_adapter_over_another_base_is_refused(tmp_path: Path) -> None:
    # Catches a service that was started with other weights in the same folder, and computes on without a word.
    ref, adapters = CheckpointRef("m", "weights", "a"), {"enable_lora": True, "lora_rank": 4, "model_name": "one"}
    others = [({"model_name": "two"}, "name 'one'"), ({"seed": 7}, "seed 42")]

    worker = worker_of(service_config(tmp_path, **adapters))
    done(worker, ops.CreateModel("m"), ops.SaveWeights("m", "a"))
    for changed, told in others:
        other = worker_of(service_config(tmp_path, **(adapters | changed)))
        refused = refusal_of(other, ops.CreateModel("n", checkpoint=ref))
        assert refused.status == 400
        assert told in refused.message
        done(other, ops.CreateModel("n"))
        refused = refusal_of(other, ops.LoadWeights("n", ref, optimizer=True))


def test_workers_that_restart_keep_how_their_gpus_communicate(tmp_path: Path, run_ranks) -> None:
    """Catches workers that measure again after a crash, and a record that only rank 0 reads."""

    def first() -> None:
        keep_choices({"0,1": "nccl"})  # stands for a measurement on GPUs
        worker_of(service_config(tmp_path, **shards(2)))

    def restarted() -> dict[str, Transport]:
        worker_of(service_config(tmp_path, **shards(2)))
        return choices()

    run_ranks(first, 2)
    assert run_ranks(restarted, 2) == [{"0,1": "nccl"}] * 2
