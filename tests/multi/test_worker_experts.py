"""The service's workers with a mixture of experts: gradients, routers and their statistics, samples, checkpoints."""

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from placement import assert_same, whole
from ranks import Launch, Launches
from tiny_models import hf_config
from worker_ranks import (
    VOCAB,
    ask,
    assert_scored_as_trained,
    datum,
    done,
    gradients,
    same,
    saved_by,
    service_config,
    shards,
    train,
    trained_values,
    worker_of,
)
from xorl.core.loss import cross_entropy
from xorl.data.batch import Document, collate
from xorl.lora import adapters
from xorl.server import operations as ops
from xorl.server.datum import Array, Datum
from xorl.server.identifiers import CheckpointRef
from xorl.server.worker.adapters import AdapterModels
from xorl.server.worker.worker import Worker
from xorl.train.build import build_engine

# A balancing loss that is not part of any client's loss, a dense layer, and padding in most rows.
SHAPE = hf_config(
    "qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1], output_router_logits=True, router_aux_loss_coef=0.5
)
REPLICAS: dict[str, object] = {"data_parallel_mode": "ddp", "data_parallel_replicate_size": -1}
KINDS: dict[str, dict[str, object]] = {
    "full": {"freeze_router": False},
    "replicas": {"freeze_router": False, **REPLICAS},
    "frozen": {"log_router_stats": False, "router_fp32": False, "moe_implementation": "eager"},
    "lora": {"enable_lora": True, "lora_rank": 8},
    "lora experts": {
        "enable_lora": True,
        "lora_rank": 8,
        "lora_target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"],
    },
}
KINDS["lora replicas"] = {**KINDS["lora experts"], **REPLICAS}
KINDS["lora outer"] = {**KINDS["lora experts"], "moe_hybrid_shared_lora": True}
TRAINED = [
    ("full", False),
    ("full", True),
    ("replicas", True),
    ("lora replicas", True),
    ("frozen", False),
    *((kind, divided) for kind in ("lora", "lora experts") for divided in (False, True)),
    ("lora outer", True),
]
SAMPLED = [("full", False), ("full", True), ("lora", True), ("lora experts", True)]
DIVERGED = ("lora", "lora experts")
STATISTICS = ("balance_loss", "z_loss", "imbalance", "entropy", "dead_experts")


def make(folder: Path, kind: str, num_ranks: int, *model_ids: str, divided: bool = False) -> Worker:
    """divided: each rank has its own experts."""
    sizes = {} if kind.endswith("replicas") else shards(num_ranks)
    options = {**KINDS[kind], **sizes, "expert_parallel_size": num_ranks if divided else 1}
    worker = worker_of(service_config(folder, shape=SHAPE, **options))
    for model_id in model_ids:
        done(worker, ops.CreateModel(model_id, lora=ops.LoraSpec(seed=42) if kind.startswith("lora") else None))
    return worker


def rows(seed: int, lengths: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens, labels that are not shifted) of documents; some tokens are not trained."""
    generator = np.random.default_rng(seed)
    ids = [generator.integers(0, VOCAB, length) for length in lengths]
    return [(row, np.where(generator.random(len(row)) < 0.3, -100, row)) for row in ids]


def data_of(documents: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[Datum]:
    """As a client sends them: a token that is not trained has weight 0, and what follows the last one is invented."""
    return [
        Datum(
            Array.of(ids.astype(np.int32)),
            {
                "target_tokens": Array.of(np.append(ids[1:], 0).astype(np.int64)),
                "weights": Array.of(np.append(labels[1:] != -100, False).astype(np.float32)),
            },
        )
        for ids, labels in documents
    ]


def local(worker: Worker, documents: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[dict[str, Tensor], list[float]]:
    """The gradient of local training and the metrics of routers, for one micro-batch on one rank."""
    base = worker.base
    train = base.local.train.model_copy(update={"router_aux_loss_coef": 0.0})
    config = base.local.model_copy(update={"train": train})
    engine = build_engine(config, base.architecture, base.mesh, base.device)
    packed = collate([Document(*one) for one in documents], pad_to_multiple_of=base.local.data.pad_to_multiple_of)
    losses = engine.forward_backward([packed], cross_entropy)
    module = engine.model.module
    adapted = adapters(module)
    found = {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None and not adapted}
    for name, adapter in adapted.items():
        found |= {f"{name}.lora_A": whole(adapter.A.grad), f"{name}.lora_B": whole(adapter.B.grad)}
    assert losses.routers is not None
    return found, [metric.item() for metric in losses.routers.metrics().values()]


def statistics(worker: Worker, model_id: str) -> list[float]:
    """Those of the routers with an optimizer step."""
    result = done(worker, ops.OptimStep(model_id, 1e-2))
    found = {name: value for name, value in result.metrics.items() if name.startswith("router_")}
    assert list(found) == [f"router_{name}" for name in STATISTICS] or not found
    return list(found.values())


def trained(
    folder: Path, kind: str, num_ranks: int, divided: bool
) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor], list[float]]:
    """A client's gradients and statistics, and those of local training where there is one rank."""
    documents, other = rows(1, [9, 14, 5, 11, 7]), rows(2, [13, 6, 8])
    worker = make(folder, kind, num_ranks, "m", *(["n"] if kind.startswith("lora") else []), divided=divided)
    before = trained_values(worker, "m")
    done(worker, ops.ForwardBackward("m", data_of(other), "cross_entropy"), ops.AbortGradients("m"))
    if num_ranks == 1:
        done(worker, ops.ForwardBackward("m", data_of(documents), "cross_entropy"))
    else:
        done(worker, ops.ForwardBackward("m", data_of(documents[:2]), "cross_entropy"))
        done(worker, ops.ForwardBackward("m", data_of(other), "cross_entropy", forward_only=True))
        calls = [ops.ForwardBackward("m", data_of(documents[2:]), "cross_entropy")]
        if kind.startswith("lora"):
            calls.append(ops.ForwardBackward("n", data_of(other), "cross_entropy"))
        assert all(isinstance(result, ops.LossResult) for result in ask(worker, *calls))
    # A of an adapter has no gradient yet, since B is 0.
    found = {name: gradient for name, gradient in gradients(worker, "m").items() if gradient.any()}
    expected, expected_statistics = local(worker, documents) if num_ranks == 1 else ({}, [])
    of_step = statistics(worker, "m")
    after = trained_values(worker, "m")
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved >= found.keys()
    assert (before.keys() - moved == {name for name in before if ".gate." in name}) == (kind == "frozen")
    return found, of_step, expected, expected_statistics


def check_samples_and_checkpoints(folder: Path, kind: str, divided: bool) -> None:
    """Asserts in each rank."""
    data = [datum(8 + i, i) for i in range(5)]
    worker = make(folder, kind, 2, "m", divided=divided)
    done(worker, *train("m", data), ops.SaveWeightsForSampler("m", "s", sampler_id="s"))
    prompts = [datum(length, 20 + length).tokens for length in (3, 17, 9)]
    asked = [
        ops.Sample(saved_by("m", "s"), prompt, num_samples=2, max_tokens=6, seed=i, ignore_end=True)
        for i, prompt in enumerate(prompts)
    ]
    samples = ask(worker, *asked)
    for prompt, result in zip(prompts, samples, strict=True):
        assert isinstance(result, ops.SampleResult), result
        assert_scored_as_trained(worker, prompt, result)
    done(worker, ops.SaveWeights("m", "a"), *train("m", data))
    restored = make(folder, kind, 2, divided=divided)
    done(
        restored,
        ops.CreateModel("n", checkpoint=CheckpointRef("m", "weights", "a"), with_optimizer=True),
        *train("n", data),
    )
    assert same(trained_values(worker, "m"), trained_values(restored, "n"))
    again = ask(worker, asked[0])
    assert isinstance(again[0], ops.SampleResult)
    assert isinstance(samples[0], ops.SampleResult)
    for one, other in zip(again[0].sequences, samples[0].sequences, strict=True):
        assert one.tokens.numpy().tolist() == other.tokens.numpy().tolist()


def check_beside_a_diverged_model(folder: Path, kind: str) -> None:
    """Asserts in one rank."""
    data = data_of(rows(1, [9, 14, 5]))
    worker = make(folder, kind, 1, "bad", "good")
    assert isinstance(worker.models, AdapterModels)
    with torch.no_grad():
        for adapter in worker.models.bank.adapters("bad").values():
            adapter.B.fill_(torch.nan)
    done(worker, ops.ForwardBackward("good", data, "cross_entropy"))
    alone, expected = gradients(worker, "good"), worker.models.bank.snapshot("good")
    of_step = statistics(worker, "good")
    worker.models.bank.restore("good", expected)
    ask(worker, *(ops.ForwardBackward(name, data, "cross_entropy") for name in ("bad", "good")))
    torch.testing.assert_close(gradients(worker, "good"), alone, rtol=1e-4, atol=1e-5)
    assert statistics(worker, "good") == pytest.approx(of_step, rel=1e-5)


@pytest.fixture(scope="module")
def found(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """By what is computed, the kind and whether each rank has its own experts: the table of this module."""

    def folder() -> Path:
        return tmp_path_factory.mktemp("worker")

    cells = {}
    for (kind, divided), num_ranks in product(TRAINED, (1, 2)):
        cells["trained", kind, divided, num_ranks] = (num_ranks, partial(trained, folder(), kind, num_ranks, divided))
    for kind, divided in SAMPLED:
        cells["sampled", kind, divided] = (2, partial(check_samples_and_checkpoints, folder(), kind, divided))
    for kind in DIVERGED:
        cells["diverged", kind] = (1, partial(check_beside_a_diverged_model, folder(), kind))
    return launch(cells)


@pytest.mark.parametrize(("kind", "divided"), TRAINED)
def test_gradients_and_statistics_are_those_of_local_training_for_any_split(
    kind: str, divided: bool, found: Launches
) -> None:
    # Catches a loss of routers that no client asked for, a frozen router that learns, statistics of another client's
    # tokens, of a call that was aborted, or of one call of several, and options that do not reach the model.
    [(alone, of_step, expected, expected_statistics)] = found("trained", kind, divided, 1)
    assert ("model.layers.0.mlp.gate.weight" in expected) == (kind in ("full", "replicas"))
    # The service's adapters train the head too, unless a client leaves it out.
    assert_same({name: expected.get(name, value) for name, value in alone.items()}, alone, limit=1e-5)
    assert {name for name, value in expected.items() if value.any()} == {name for name in alone if name in expected}
    assert of_step == pytest.approx([] if kind == "frozen" else expected_statistics, rel=1e-5)
    (first, *of_splits), (second, *_) = found("trained", kind, divided, 2)
    # The gradient of an adapter is summed over ranks by its step.
    split = {name: first[name] + second[name] if kind.startswith("lora") else first[name] for name in first}
    assert_same(alone, split, limit=1e-5)
    assert of_splits[0] == pytest.approx(of_step, rel=1e-5)


@pytest.mark.parametrize(("kind", "divided"), SAMPLED)
def test_samples_and_checkpoints_are_of_the_trained_model(kind: str, divided: bool, found: Launches) -> None:
    # Catches log-probabilities that training does not have, sequences that change each other's, a snapshot or a
    # checkpoint that lacks the experts, and a restored model that trains otherwise.
    found("sampled", kind, divided)


@pytest.mark.parametrize("kind", DIVERGED)
def test_a_model_that_has_diverged_does_not_change_another(kind: str, found: Launches) -> None:
    # Catches NaN of one client's tokens in the gradient or the statistics of the next client in the row.
    found("diverged", kind)
