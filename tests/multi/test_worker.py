"""The service's workers compute what plain torch computes, on one rank and on two, and keep what they are told to."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from placement import whole
from worker_ranks import (
    ADAPTER,
    HF_CONFIG,
    KINDS,
    LORA,
    ask,
    datum,
    done,
    gradients,
    make,
    refusal_of,
    same,
    service_config,
    shards,
    train,
    trained_values,
    values,
    worker_of,
)
from xorl.core.loss import cross_entropy
from xorl.core.models import spec_for
from xorl.core.nn import LayerKernels
from xorl.data.batch import Document, collate
from xorl.kernels.layout import SequenceLayout
from xorl.lora import AdapterSpec, adapters, init_adapters, inject
from xorl.server import operations as ops
from xorl.server.datum import Array, Datum
from xorl.server.identifiers import CheckpointKind, CheckpointRef, checkpoint_folder
from xorl.server.worker.adapters import AdapterModels
from xorl.train.build import build_engine

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


class Reference:
    """The same model without packing, placement or kernels, trained by torch's own AdamW."""

    def __init__(self, kind: str) -> None:
        spec = spec_for(HF_CONFIG)
        with torch.device("meta"):
            self.model = spec.build(spec.config_from_hf(HF_CONFIG), merge_qkv=True, kernels=LayerKernels())
            if kind == "lora":
                inject(self.model, AdapterSpec(rank=3, alpha=8.0, targets=TARGETS))
        self.model.to_empty(device="cpu")
        self.model.init_weights(42)
        if kind == "lora":
            init_adapters(self.model, seed=5)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    def logprobs(self, one: Datum) -> Tensor:
        """[n] or [n, K]."""
        tokens = torch.from_numpy(one.tokens.numpy().astype(np.int64))
        targets = torch.from_numpy(one.arrays["target_tokens"].numpy().copy())
        logits = self.model(tokens, SequenceLayout.from_lengths([len(tokens)]))
        found = F.log_softmax(logits.float(), dim=-1)
        return found.gather(1, targets.reshape(len(tokens), -1)).reshape(targets.shape)

    def backward(self, data: list[Datum]) -> tuple[float, list[Tensor]]:
        """-sum(weight * log p), whose gradient is added, and the log-probabilities."""
        found = [self.logprobs(one) for one in data]
        weights = [torch.from_numpy(one.arrays["weights"].numpy().copy()) for one in data]
        loss = -torch.stack([(w * p).sum() for w, p in zip(weights, found, strict=True)]).sum()
        loss.backward()
        return float(loss.detach()), [one.detach() for one in found]

    def step(self, operation: ops.OptimStep) -> float:
        """The norm before clipping."""
        limit = operation.grad_clip_norm or float("inf")
        norm = nn.utils.clip_grad_norm_(self.parameters, limit)
        if not hasattr(self, "optimizer"):
            self.optimizer = torch.optim.AdamW(self.parameters)
        for group in self.optimizer.param_groups:
            group.update(
                lr=operation.learning_rate,
                betas=(operation.beta1, operation.beta2),
                eps=operation.eps,
                weight_decay=operation.weight_decay,
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def trained(self) -> dict[str, Tensor]:
        """Values by name; those of adapters as a bank names them."""
        found = dict(self.model.named_parameters())
        for name, adapter in adapters(self.model).items():
            found |= {f"{name}.lora_A": adapter.A, f"{name}.lora_B": adapter.B}
        return {name: value.detach().clone() for name, value in found.items() if value.requires_grad}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", list(KINDS))
def test_losses_gradients_and_steps_are_those_of_plain_torch(
    kind: str, num_ranks: int, tmp_path: Path, run_ranks
) -> None:
    # Catches labels that are shifted again, means, ranks that repeat each other's work, lost or stale
    # hyperparameters, and values that come back to other data.
    calls = [
        [datum(5 + 2 * i, i, weights=w) for i, w in enumerate((1.0, 0.25, -0.5, 0.0, 2.0, 1.0, 1.0))],
        [datum(40, 9, weights=1.0), datum(3, 10, num_targets=3, weights=0.5), datum(4, 11, num_targets=2, weights=1.0)],
    ]
    # Of a gradient near 0, Adam with a small eps makes a step that hangs on its rounding.
    steps = [
        ops.OptimStep("m", 1e-2, 0.8, 0.9, 1e-2, 0.1, grad_clip_norm=1.0),
        ops.OptimStep("m", 3e-3, 0.9, 0.95, 1e-3, 0.0),
    ]
    plain = Reference(kind)
    wanted: list[tuple[float, list[Tensor]]] = []
    norms: list[float] = []
    for step in steps:
        wanted += [plain.backward(data) for data in calls]
        norms.append(plain.step(step))

    def run() -> tuple[list[object], dict[str, Tensor]]:
        worker = make(tmp_path, kind, **shards(num_ranks))
        results = []
        for step in steps:
            results += [done(worker, ops.ForwardBackward("m", data, "cross_entropy")) for data in calls]
            results.append(done(worker, step))
        return results, trained_values(worker, "m")

    every = run_ranks(run, num_ranks)
    results, learnt = every[0]
    losses = [result for result in results if isinstance(result, ops.LossResult)]
    for got, (loss, logprobs) in zip(losses, wanted, strict=True):
        assert got.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
        for one, other in zip(got.fields["logprobs"], logprobs, strict=True):
            np.testing.assert_allclose(values(one), other.numpy(), rtol=1e-5, atol=1e-5)
    updates = [result for result in results if isinstance(result, ops.OptimResult)]
    for index, (update, norm) in enumerate(zip(updates, norms, strict=True)):
        assert update.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert update.metrics["step"] == index + 1
        squares = sum(value**2 for name, value in update.metrics.items() if name.startswith("grad_norm/"))
        assert squares**0.5 == pytest.approx(norm, rel=1e-4)
    reference = plain.trained()
    for name, value in learnt.items():
        torch.testing.assert_close(value, reference[name], rtol=1e-4, atol=1e-5)
    for _, other in every[1:]:
        assert same(other, learnt)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_service_and_local_training_give_the_same_gradient_to_the_bit(kind: str, tmp_path: Path) -> None:
    # Catches a service that computes by other ways than local training.
    rows = [np.random.default_rng(seed).integers(0, 60, 9 + seed) for seed in range(4)]
    targets = [np.append(row[1:], -100) for row in rows]
    data = [
        Datum(Array.of(row.astype(np.int32)), {"target_tokens": Array.of(own.astype(np.int64))})
        for row, own in zip(rows, targets, strict=True)
    ]
    # Ranks that a bank has no room beside; local training leaves the head out.
    options = {**LORA, "lora_rank": 8, "lora_target_modules": "all-linear"} if kind == "lora" else {}

    worker = worker_of(service_config(tmp_path, **options))
    done(worker, ops.CreateModel("m", lora=ops.LoraSpec(seed=42) if kind == "lora" else None))
    result = done(worker, ops.ForwardBackward("m", data, "cross_entropy"))
    base = worker.base
    engine = build_engine(base.local, base.architecture, base.mesh, base.device)
    packed = collate([Document(row, row) for row in rows], pad_to_multiple_of=base.local.data.pad_to_multiple_of)
    losses = engine.forward_backward([packed], cross_entropy)
    assert float(losses.loss_sum) == pytest.approx(result.metrics["loss:sum"], rel=1e-6)
    module = engine.model.module
    local = {name: whole(p.grad) for name, p in module.named_parameters() if p.requires_grad}
    for name, adapter in adapters(module).items():
        local |= {f"{name}.lora_A": whole(adapter.A.grad), f"{name}.lora_B": whole(adapter.B.grad)}
    found = gradients(worker, "m")
    assert len(found) > 10
    assert all(torch.equal(gradient, local[name]) for name, gradient in found.items())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_failed_call_leaves_the_gradient_on_every_rank(kind: str, tmp_path: Path) -> None:
    # Catches half of a failed forward_backward in the next step, and workers that hang or end with it.
    good = [datum(5 + i, i) for i in range(5)]

    worker = make(tmp_path, kind, **shards(2))
    done(worker, ops.ForwardBackward("m", good, "cross_entropy"))
    before = gradients(worker, "m")
    bad = [
        (ops.ForwardBackward("m", [good[0], datum(65)], "cross_entropy"), "datum 1 has 65 tokens"),
        (ops.ForwardBackward("m", good, "nonsense"), "unknown loss 'nonsense'"),
        (ops.ForwardBackward("m", good, "ppo"), "needs logprobs and advantages"),
        (ops.ForwardBackward("m", good, "cross_entropy", {"temperature": 2.0}), "has no option 'temperature'"),
        (ops.ForwardBackward("x", good, "cross_entropy"), "there is no model 'x'"),
        (ops.ForwardBackward("m", [], "cross_entropy"), "data is empty"),
        (ops.ForwardBackward("m", [datum(4, mask=1.0)], "cross_entropy"), "unknown input mask"),
    ]
    for operation, message in bad:
        failure = refusal_of(worker, operation)
        assert failure.category == "user"
        assert message in failure.message
    layer = worker.base.module.layers[1]

    def broken(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        raise RuntimeError("a kernel failed")

    for hook in (layer.register_forward_hook(broken), layer.register_full_backward_pre_hook(_broken_backward)):
        (failure,) = ask(worker, ops.ForwardBackward("m", good, "cross_entropy"))
        hook.remove()
        assert failure.category == "server"
    after = gradients(worker, "m")
    torch.testing.assert_close(before, after, rtol=0, atol=0)
    done(worker, ops.ForwardBackward("m", good, "cross_entropy"), ops.OptimStep("m", 1e-2))
    learnt = trained_values(worker, "m")
    done(worker, ops.ForwardBackward("m", good, "cross_entropy"), ops.AbortGradients("m"))
    update = done(worker, ops.OptimStep("m", 1e-2))
    assert (update.metrics["no_gradient"], update.metrics["step"]) == (1, 1)
    assert same(learnt, trained_values(worker, "m"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fails", ["backward", "preparing"])
def test_one_rank_that_fails_fails_the_call_on_all(fails: str, tmp_path: Path) -> None:
    # Catches a gradient that only the other ranks have, ranks that then meet in different collectives, and ranks that
    # begin a pass while another, whose adapter is lost on its disk, tells them of its failure.
    data = [datum(5 + i, i) for i in range(6)]
    call = ops.ForwardBackward("m", data, "cross_entropy")
    options = {"data_parallel_mode": "ddp", "data_parallel_replicate_size": 2}
    options |= {"lora_models_on_device": 1} if fails == "preparing" else {}
    worker = worker_of(service_config(tmp_path, **LORA | options))
    assert isinstance(worker.models, AdapterModels)
    done(worker, ops.CreateModel("m", lora=ADAPTER), call)
    before = gradients(worker, "m")
    is_broken = worker.base.runtime.rank == 1
    if fails == "preparing":
        done(worker, ops.CreateModel("other", lora=ADAPTER))
        store = worker.models.bank._store
        away = store.get("m")
        if is_broken:
            store.drop("m")
        assert "its file on disk cannot be read" in refusal_of(worker, call).message
        if is_broken:
            store.put("m", away)
    else:
        hook = worker.base.module.layers[1].register_full_backward_pre_hook(_broken_backward) if is_broken else None
        assert "a kernel failed" in refusal_of(worker, call).message
        if hook is not None:
            hook.remove()
    assert same(before, gradients(worker, "m"))
    done(worker, *train("m", data))


def _broken_backward(module: nn.Module, given: tuple[Tensor, ...]) -> None:
    raise RuntimeError("a kernel failed")


@pytest.mark.parametrize(("kind", "num_ranks"), [("full", 1), ("full", 2), ("lora", 2)])
def test_saved_models_go_on_to_the_bit(kind: str, num_ranks: int, tmp_path: Path, run_ranks) -> None:
    # Catches states, counts and seeds that a checkpoint lacks, and names that are overwritten or lead elsewhere.
    data = [datum(4 + i, i) for i in range(5)]
    ref = CheckpointRef("m", "weights", "a")

    def first() -> dict[str, Tensor]:
        worker = make(tmp_path, kind, **shards(num_ranks))
        done(worker, *train("m", data), ops.SaveWeights("m", "a"), ops.SaveWeightsForSampler("m", "s"))
        again = refusal_of(worker, ops.SaveWeights("m", "a"), ids=["another"])
        assert again.status == 409
        assert done(worker, ops.SaveWeights("m", "a")).size_bytes > 0
        done(worker, *train("m", data))
        ask(worker, ops.SaveWeights("m", "b"), ids=["b"])
        assert isinstance(ask(worker, ops.SaveWeights("m", "b", overwrite=True), ids=["c"])[0], ops.Saved)
        done(worker, ops.SaveFullWeights("m", "e"), ops.SaveFullWeights("m", "alone", is_merged=False))
        return trained_values(worker, "m")

    def second() -> dict[str, Tensor]:
        worker = worker_of(service_config(tmp_path, **KINDS[kind], **shards(num_ranks)))
        missing = refusal_of(worker, ops.CreateModel("n", checkpoint=CheckpointRef("m", "weights", "no")))
        assert missing.status == 404
        created = done(worker, ops.CreateModel("n", checkpoint=ref, with_optimizer=True))
        assert (created.num_steps, created.lora_rank) == (1, 3 if kind == "lora" else None)
        names: dict[CheckpointKind, str] = {"weights": "a", "sampler_weights": "s", "external_weights": "e"}
        for saved, name in names.items():
            folder = checkpoint_folder(tmp_path / "outputs", CheckpointRef("m", saved, name))
            took = sum(file.stat().st_size for file in folder.rglob("*"))
            assert created.checkpoint_bytes[saved] == pytest.approx(took, rel=0.3)
        done(worker, *train("n", data))
        got = trained_values(worker, "n")
        done(worker, ops.LoadWeights("n", ref, optimizer=True), *train("n", data))
        assert same(got, trained_values(worker, "n"))
        done(worker, ops.LoadWeights("n", CheckpointRef("m", "sampler_weights", "s"), optimizer=False))
        refusal_of(worker, ops.LoadWeights("n", CheckpointRef("m", "sampler_weights", "s"), optimizer=True))
        done(worker, *train("n", data))
        assert not same(got, trained_values(worker, "n"))
        return got

    def third() -> None:
        options = {
            "output_dir": str(tmp_path / "others"),
            "load_checkpoint_path": str(tmp_path / "outputs/weights/m/a"),
        }
        config = service_config(tmp_path, **KINDS[kind], **shards(num_ranks), **options)
        if kind == "lora":
            with pytest.raises(ValueError, match="holds an adapter"):
                worker_of(config)
            return
        worker = worker_of(config)
        done(worker, ops.CreateModel("x"))
        start = trained_values(worker, "x")
        done(worker, *train("x", data), ops.UnloadModel("x"), ops.CreateModel("y"))
        assert same(start, trained_values(worker, "y"))

    wanted = run_ranks(first, num_ranks)[0]
    assert same(wanted, run_ranks(second, num_ranks)[0])
    run_ranks(third, num_ranks)
    assert (tmp_path / "outputs" / "weights" / "m" / "a" / "metadata.json").is_file()
    assert list((tmp_path / "outputs" / "external_weights" / "m" / "e").glob("*.safetensors"))
    (alone,) = (tmp_path / "outputs" / "external_weights" / "m" / "alone").glob("*.safetensors")
    assert kind != "lora" or alone.read_bytes() == (tmp_path / "outputs/weights/m/b" / alone.name).read_bytes()


def test_an_adapter_is_not_loaded_over_a_base_of_other_values(tmp_path: Path, run_ranks) -> None:
    # Catches a base that is quantised in another way, over which an adapter computes something else without a word.
    quantized = {"enable_qlora": True, "quant_format": "nf4", "quant_group_size": 16}
    ref = CheckpointRef("a", "weights", "s")

    def run() -> None:
        worker = make(tmp_path, "lora", "a", **quantized)
        done(worker, ops.SaveWeights("a", "s"))
        done(worker, ops.CreateModel("b", checkpoint=ref))
        plain = worker_of(service_config(tmp_path, **KINDS["lora"]))
        for with_optimizer in (False, True):
            refusal = refusal_of(plain, ops.CreateModel("c", checkpoint=ref, with_optimizer=with_optimizer))
            assert "is an adapter over another base: quantization {" in refusal.message

    run_ranks(run, 1)


def test_stages_expect_checkpoints_of_the_whole_model(tmp_path: Path, run_ranks) -> None:
    # Catches a disk that has room for one stage's part alone.
    def expected(**options: object) -> dict[CheckpointKind, int]:
        worker = worker_of(service_config(tmp_path, **options))
        return done(worker, ops.CreateModel("m")).checkpoint_bytes

    [whole] = run_ranks(expected, 1)
    assert run_ranks(lambda: expected(pipeline_parallel_size=2), 2) == [whole, whole]


@pytest.mark.ranks(2)
def test_models_in_one_pass_are_what_they_are_alone(tmp_path: Path) -> None:
    # Catches clients who see each other's tokens, metrics or gradients, and more models than one pass holds.
    names = ("a", "b", "c", "d")
    own = {
        name: [datum(4 + 3 * i + 5 * j, 7 * i + j, weights=1.0 + i) for j in range(3)] for i, name in enumerate(names)
    }

    worker = worker_of(service_config(tmp_path, **LORA, **shards(2)))
    for index, name in enumerate(names):
        done(worker, ops.CreateModel(name, lora=ops.LoraSpec(rank=1 + index, seed=index)))
    alone = {name: [done(worker, *train(name, own[name])), trained_values(worker, name)] for name in names}
    for name in names:
        done(worker, ops.UnloadModel(name))
        done(worker, ops.CreateModel(name, lora=ops.LoraSpec(rank=1 + names.index(name), seed=names.index(name))))
    calls = [ops.ForwardBackward(name, own[name], "cross_entropy") for name in names]
    wanted = [done(worker, ops.ForwardBackward(n, own[n], "cross_entropy", forward_only=True)) for n in names]
    wrong = ops.ForwardBackward("a", [datum(70)], "cross_entropy")
    results = ask(worker, *calls, wrong)
    assert isinstance(results.pop(), ops.Failure)
    for got, one in zip(results, wanted, strict=True):
        assert isinstance(got, ops.LossResult)
        assert got.metrics == pytest.approx(one.metrics, rel=1e-5)
        for mine, other in zip(got.fields["logprobs"], one.fields["logprobs"], strict=True):
            np.testing.assert_allclose(values(mine), values(other), atol=1e-5)
    for name in names:
        done(worker, ops.OptimStep(name, 1e-2))
        for key, value in trained_values(worker, name).items():
            torch.testing.assert_close(value, alone[name][1][key], rtol=1e-3, atol=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("train_unembed", [True, False])
def test_a_model_that_has_diverged_says_so_and_others_keep_their_numbers(train_unembed: bool, tmp_path: Path) -> None:
    """Catches the loss of a uniform guess for a model of NaN, and NaN of its head in the loss of others."""
    policy = {"logprobs": -3.0, "advantages": 1.0}
    asked = {
        "cross_entropy": [datum(6, 1)],
        "ppo": [datum(6, 1, **policy)],
        "causallm_loss": [datum(6, 1, num_targets=3)],
    }

    worker = worker_of(service_config(tmp_path, **LORA, **shards(2)))
    done(
        worker,
        ops.CreateModel("good", lora=ADAPTER),
        ops.CreateModel("bad", lora=ops.LoraSpec(train_unembed=train_unembed)),
    )
    done(worker, *train("bad", [datum(9)], lr=1e38))
    for loss_fn, data in asked.items():
        good, bad = (ops.ForwardBackward(name, data, loss_fn, forward_only=True) for name in ("good", "bad"))
        (alone,), (spoilt,) = ask(worker, good), ask(worker, bad)
        # One datum to each rank, and then both rows of each rank with both models in them.
        beside, spoilt_beside = ask(worker, good, bad)
        both = ops.ForwardBackward("good", data * 2, loss_fn), ops.ForwardBackward("bad", data * 2, loss_fn)
        mixed, spoilt_mixed = ask(worker, *both)
        for result in (spoilt, spoilt_beside, spoilt_mixed):
            assert isinstance(result, ops.LossResult), result
            numbers = {name: value for name, value in result.metrics.items() if name != "valid_tokens:sum"}
            assert np.isnan(list(numbers.values())).all(), (loss_fn, numbers)
            assert all(np.isnan(values(array)).all() for found in result.fields.values() for array in found)
        for result, times in ((beside, 1), (mixed, 2)):
            assert isinstance(alone, ops.LossResult)
            assert result.metrics["loss:sum"] == pytest.approx(times * alone.metrics["loss:sum"], rel=1e-5)
            for array in result.fields["logprobs"]:
                np.testing.assert_allclose(values(array), values(alone.fields["logprobs"][0]), atol=1e-5)
    ask(worker, *(ops.ForwardBackward(name, asked["ppo"], "ppo") for name in ("good", "bad")))
    steps = [done(worker, ops.OptimStep(name, 1e-2)) for name in ("good", "bad")]
    assert [step.metrics["skipped"] for step in steps if isinstance(step, ops.OptimResult)] == [0, 1]
