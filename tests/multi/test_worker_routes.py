"""The service's workers replay recorded experts: on every layout as in one process, and their own to the bit."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from placement import assert_same
from tiny_models import hf_config
from worker_ranks import LORA, ask, assert_scored_as_trained, datum, done, gradients, service_config, values, worker_of
from xorl.server import operations as ops
from xorl.server.datum import Array, Datum
from xorl.server.worker.worker import Worker

# The dense layer is in the middle of the layers of a record.
SHAPE = hf_config("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1], initializer_range=0.3)
NUM_LAYERS, NUM_EXPERTS, NUM_ACTIVE = 3, 4, 2
KINDS: dict[str, dict[str, object]] = {"full": {"freeze_router": False}, "lora": LORA}
LAYOUTS: dict[str, dict[str, object]] = {
    "ulysses": {"ulysses_parallel_size": 2},
    "ring": {"ringattn_parallel_size": 2},
    "tensor": {"tensor_parallel_size": 2},
    "experts": {"data_parallel_shard_size": 2, "expert_parallel_size": 2},
    "recomputed": {"data_parallel_shard_size": 2, "expert_parallel_size": 2, "enable_gradient_checkpointing": True},
}
# Two rows of 128 tokens, of which both ranks have parts of several documents.
LENGTHS = (17, 59, 1, 90, 31, 45)
RETURNED = {"return_routed_experts": True}


def make(folder: Path, kind: str, **layout: object) -> Worker:
    worker = worker_of(service_config(folder, shape=SHAPE, sample_packing_sequence_len=128, **KINDS[kind], **layout))
    for model_id in ("m", "n") if kind == "lora" else ("m",):
        done(worker, ops.CreateModel(model_id, lora=ops.LoraSpec(seed=42) if kind == "lora" else None))
    return worker


def with_records(data: list[Datum], records: list[NDArray[np.generic] | None]) -> list[Datum]:
    arrays = [None if record is None else Array.of(record.astype(np.int16)) for record in records]
    return [replace(one, routed_experts=array) for one, array in zip(data, arrays, strict=True)]


def from_main(value: object) -> object:
    """A result, which only rank 0 has, on all ranks."""
    shared = [value]
    dist.broadcast_object_list(shared)
    return shared[0]


def losses(worker: Worker, data: list[Datum], **options: object) -> ops.LossResult:
    result = from_main(done(worker, ops.ForwardBackward("m", data, "cross_entropy", options)))
    assert isinstance(result, ops.LossResult)
    return result


def record_of(worker: Worker, data: list[Datum], *, forward_only: bool) -> list[NDArray[np.generic]]:
    call = ops.ForwardBackward("m", data, "cross_entropy", dict(RETURNED), forward_only)
    result = from_main(done(worker, call))
    assert isinstance(result, ops.LossResult)
    records = [array.numpy() for array in result.fields["routed_experts"]]
    assert [record.shape for record in records] == [(length, NUM_LAYERS, NUM_ACTIVE) for length in LENGTHS]
    assert all(not record[:, 1].any() for record in records)
    return records


def other_experts(seed: int, length: int) -> NDArray[np.int16]:
    """Random experts, of the layers that have any."""
    scores = np.random.default_rng(seed).random((length, NUM_LAYERS - 1, NUM_EXPERTS))
    return scores.argsort(-1)[..., :NUM_ACTIVE].astype(np.int16)


def check_identity(worker: Worker, data: list[Datum]) -> None:
    """Its own record changes no bit; neither does a document without a record, or one without that of its last token.

    A record that is a token late changes the loss.
    """
    records = record_of(worker, data, forward_only=True)
    for record, same in zip(records, record_of(worker, data, forward_only=False), strict=True):
        np.testing.assert_array_equal(record, same)
    done(worker, ops.AbortGradients("m"))
    free, expected = losses(worker, data), gradients(worker, "m")
    done(worker, ops.AbortGradients("m"))
    replayed = losses(worker, with_records(data, [records[0], None, *(one[:-1] for one in records[2:])]))
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(worker, "m").items())
    assert any(gradient.any() for gradient in expected.values())
    assert replayed.metrics == free.metrics
    assert replayed.fields == free.fields
    done(worker, ops.AbortGradients("m"))
    late = losses(worker, with_records(data, [np.roll(record, 1, axis=0) for record in records]))
    assert abs(late.metrics["loss:sum"] - free.metrics["loss:sum"]) > 1e-3
    done(worker, ops.AbortGradients("m"))


def replay_others(
    worker: Worker, kind: str, data: list[Datum]
) -> tuple[list[NDArray[np.float32]], dict[str, Tensor], dict[str, float]]:
    """With experts that the routers would not choose: log-probabilities, gradients, and statistics of the routers."""
    records = [None if index == 1 else other_experts(index, length) for index, length in enumerate(LENGTHS)]
    calls = [ops.ForwardBackward("m", with_records(data, records), "cross_entropy")]
    if kind == "lora":
        # Another client's data, in the same rows and without records.
        calls.append(ops.ForwardBackward("n", [datum(8, 70), datum(13, 71)], "cross_entropy"))
    results = from_main(ask(worker, *calls))
    assert isinstance(results, list)
    alone = from_main(ask(worker, *calls[1:])) if len(calls) > 1 else []
    for together, one in zip(results[1:], alone, strict=True):
        for found, expected in zip(together.fields["logprobs"], one.fields["logprobs"], strict=True):
            np.testing.assert_allclose(values(found), values(expected), atol=1e-5)
    found = gradients(worker, "m")
    step = from_main(done(worker, ops.OptimStep("m", 0.0)))
    assert isinstance(step, ops.OptimResult)
    metrics = {name: value for name, value in step.metrics.items() if name.startswith("router_")}
    assert 0 < metrics["router_changed_routes"] < 1
    assert (
        "router_changed_routes"
        not in from_main(done(worker, ops.ForwardBackward("m", data, "cross_entropy"), ops.OptimStep("m", 0.0))).metrics
    )
    return [values(array) for array in results[0].fields["logprobs"]], found, metrics


def check_samples(worker: Worker) -> None:
    """Records of the sampler, fed back, give its log-probabilities."""
    prompts = [datum(length, 20 + length).tokens for length in (1, 17, 9)]
    asked = [
        ops.Sample(ops.BaseSampler(), one, num_samples=3, max_tokens=6, seed=5, ignore_end=True, routed_experts=True)
        for one in prompts
    ]
    for prompt, result in zip(prompts, from_main(ask(worker, *asked)), strict=True):
        assert result.prompt_routed_experts is not None
        assert all(sequence.routed_experts is not None for sequence in result.sequences)
        assert_scored_as_trained(worker, prompt, result)


def test_records_move_with_their_tokens(tmp_path: Path, run_ranks) -> None:
    # Catches a record that is off by a token or a layer, that packing or a part of a row loses, that recomputation
    # replaces, or that reaches the data of another client, and metrics that count a rank twice or not at all.
    data = [datum(length, 50 + index, weights=0.5) for index, length in enumerate(LENGTHS)]

    def run(layouts: dict[str, dict[str, object]]) -> dict[str, tuple]:
        found = {}
        for kind in KINDS:
            for name, layout in layouts.items():
                if (kind, name) == ("lora", "tensor"):  # refused
                    continue
                worker = make(tmp_path, kind, **layout)
                check_identity(worker, data)
                if name == "tensor":
                    [refused] = from_main(ask(worker, ops.Sample(ops.BaseSampler(), data[0].tokens, max_tokens=2)))
                    assert "sample with an inference endpoint" in refused.message
                elif name != "recomputed":  # of which samples know nothing
                    # The base is also what a new adapter computes.
                    check_samples(worker)
                found[f"{kind}, {name}"] = replay_others(worker, kind, data)
        return found

    [alone] = run_ranks(lambda: run({"alone": {}}), 1)
    for rank, found in enumerate(run_ranks(lambda: run(LAYOUTS), 2)):
        for name, (logprobs, gradient, metrics) in found.items():
            kind, _ = name.split(", ")
            expected, expected_gradient, expected_metrics = alone[f"{kind}, alone"]
            for one, other in zip(logprobs, expected, strict=True):
                np.testing.assert_allclose(one, other, atol=2e-5)
            assert metrics == pytest.approx(expected_metrics, rel=1e-4), name
            if kind == "full" and rank == 0:
                assert_same(expected_gradient, gradient, limit=1e-5)


RECORD = other_experts(0, 6)
BAD_RECORDS = {
    "rows": (RECORD[:4], r"the shape is \[4, 2, 2\], but must be \[6, layers, 2\] for 6 tokens, or \[5, \.\.\]"),
    "experts per token": (RECORD[..., :1], r"the shape is \[6, 2, 1\]"),
    "layers": (RECORD[:, :1], "it has 1 layers, but must have all 3 of the model, or the 2 with experts"),
    "too high": (np.where(RECORD == 3, 4, RECORD), "there is no expert 4: the model has experts 0 to 3"),
    "too low": (np.where(RECORD == 3, -1, RECORD), "there is no expert -1"),
    "twice": (np.where(RECORD == 3, RECORD.min(-1, keepdims=True), RECORD), "has an expert twice in layer [02]"),
    "not recorded": (RECORD * np.array([1, 0])[:, None], "layer 2 is 0 for all tokens: it was not recorded"),
    "flat": (RECORD.ravel()[:-1], "23 values fit 0 shapes of a record of 6 tokens"),
}


@pytest.mark.ranks(1)
def test_records_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    # Catches a record that is cut to fit, or skipped, or that sends tokens to experts that do not exist.
    one = datum(6, 3)
    worker = make(tmp_path, "full")
    free = losses(worker, [one])
    whole = np.zeros((6, NUM_LAYERS, NUM_ACTIVE), np.int16)
    whole[:, [0, 2]] = RECORD
    whole[0, 1] = -1  # what a dense layer has there does not matter
    forms = (RECORD, whole, RECORD.ravel(), whole.ravel())
    found = [losses(worker, with_records([one], [form])).metrics["loss:sum"] for form in forms]
    assert found == [found[0]] * len(forms)
    assert abs(found[0] - free.metrics["loss:sum"]) > 1e-3
    for name, (record, message) in BAD_RECORDS.items():
        [result] = ask(worker, ops.ForwardBackward("m", with_records([one], [record]), "cross_entropy"))
        assert isinstance(result, ops.Failure), name
        assert (result.category, result.status) == ("user", 400)
        with pytest.raises(ValueError, match="datum 0: routed_experts: .*" + message):
            raise ValueError(result.message)
    dense = worker_of(service_config(tmp_path))
    done(dense, ops.CreateModel("m"))
    for call in (
        ops.ForwardBackward("m", with_records([one], [RECORD]), "cross_entropy"),
        ops.ForwardBackward("m", [one], "cross_entropy", dict(RETURNED)),
        ops.Sample(ops.BaseSampler(), one.tokens, max_tokens=2, routed_experts=True),
    ):
        [result] = ask(dense, call)
        assert "the model has no experts" in result.message
