"""Samples of a worker: how long they may be, of which weights, and when there are none."""

from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from worker_ranks import ask, datum, done, make, refusal_of, saved_by, service_config, shards, train, values, worker_of
from xorl.config import ConfigError
from xorl.server import operations as ops
from xorl.server.datum import Array
from xorl.server.identifiers import CheckpointRef
from xorl.server.sampler.sampler import BLOCK_SIZE
from xorl.server.worker import adapters
from xorl.server.worker.adapters import AdapterModels
from xorl.server.worker.worker import Worker

ADAPTERS = {"enable_lora": True, "lora_rank": 4}


def tokens(length: int) -> Array:
    """A prompt."""
    return Array.of(np.arange(1, length + 1, dtype=np.int32) % 60)


@pytest.mark.ranks(1)
def test_a_sample_without_a_limit_takes_the_room_that_there_is(tmp_path: Path) -> None:
    """Catches a limit of the service's own making that its sampler refuses, and an empty place behind a full prompt."""
    with pytest.raises(ConfigError, match="sampler_cache_tokens"):
        service_config(tmp_path, sampler_cache_tokens=BLOCK_SIZE - 1)

    for cache_tokens, limit in ((BLOCK_SIZE, BLOCK_SIZE), (100, 96), (1024, 128)):
        worker = worker_of(service_config(tmp_path, sampler_cache_tokens=cache_tokens, **ADAPTERS))
        for length in (4, limit):
            result = done(worker, ops.Sample(ops.BaseSampler(), tokens(length), ignore_end=True))
            assert len(result.sequences[0].tokens.numpy()) == limit + 1 - length
        refused = refusal_of(worker, ops.Sample(ops.BaseSampler(), tokens(limit + 1)))
        assert (refused.status, f"maximum context length is {limit} tokens" in refused.message) == (400, True)
        refused = refusal_of(worker, ops.Sample(ops.BaseSampler(), tokens(4), max_tokens=limit))
        # It is the model's own limit that none can raise.
        assert ("sampler_cache_tokens" in refused.message) == (limit < 128)


def test_samples_of_one_request_are_dealt_to_ranks_and_are_those_of_one_rank(tmp_path: Path, run_ranks) -> None:
    """Catches ranks that stand by while one computes all samples, and samples with other seeds or in another order."""
    many = ops.Sample(
        ops.BaseSampler(), tokens(20), num_samples=11, max_tokens=6, seed=3, ignore_end=True, prompt_logprobs=True
    )
    works = [[many], [many, many], [msgspec.structs.replace(many, max_tokens=0)]]

    def run(num_ranks: int) -> tuple[list[list[ops.SampleResult]], list[int]]:
        worker = worker_of(service_config(tmp_path, **shards(num_ranks), **ADAPTERS))
        found, computed = list[list[ops.SampleResult]](), [0]
        worker.base.module.register_forward_pre_hook(lambda _, given: computed.append(computed.pop() + len(given[0])))
        for operations in works:
            found.append([one for one in ask(worker, *operations) if isinstance(one, ops.SampleResult)])
            computed.append(0)
        return found, computed

    [(alone, all_tokens)] = run_ranks(lambda: run(1), 1)
    by_rank = run_ranks(lambda: run(2), 2)
    for found, _ in by_rank:
        for one, other in zip(chain.from_iterable(alone), chain.from_iterable(found), strict=True):
            samples = [[sequence.tokens.numpy().tolist() for sequence in result.sequences] for result in (one, other)]
            assert samples[0] == samples[1]
            assert other.prompt_logprobs is not None
    # Of the first work each rank has five or six samples, and the prompt; of the second one request.
    (first, second), (both, _) = ([computed[index] for _, computed in by_rank] for index in (0, 1))
    assert max(first, second) < 0.7 * all_tokens[0]
    assert both < 0.7 * all_tokens[1]


@pytest.mark.ranks(1)
def test_a_model_that_has_diverged_fails_alone(tmp_path: Path) -> None:
    """Catches tokens that stand for no number, and a batch that fails or is spoilt by one model in it."""
    worker = worker_of(service_config(tmp_path, lora_models_on_device=3, **ADAPTERS))
    assert isinstance(worker.models, AdapterModels)
    done(
        worker,
        ops.CreateModel("sound", lora=ops.LoraSpec(seed=1)),
        ops.CreateModel("diverged", lora=ops.LoraSpec(seed=2)),
    )
    with torch.no_grad():
        for adapter in worker.models.bank.adapters("diverged").values():
            adapter.B.fill_(torch.nan)
    for model in ("sound", "diverged"):
        done(worker, ops.SaveWeightsForSampler(model, "s", sampler_id="s"))
    sound, diverged = (
        ops.Sample(sampler, tokens(20), max_tokens=8, seed=3, topk_sample_logprobs=2, prompt_logprobs=True)
        for sampler in (saved_by("sound", "s"), saved_by("diverged", "s"))
    )
    (alone,) = ask(worker, sound)
    greedy = ops.Sample(diverged.sampler, tokens(20), max_tokens=1, temperature=0.0)
    scoring = ops.Sample(diverged.sampler, tokens(20), max_tokens=0, prompt_logprobs=True)
    together = ask(worker, diverged, sound, greedy, scoring, sound)
    for index in (0, 2, 3):
        failure = together[index]
        assert (failure.status, "has diverged" in failure.message) == (400, True)
    assert isinstance(alone, ops.SampleResult)
    for result in (together[1], together[4]):
        assert isinstance(result, ops.SampleResult), result
        np.testing.assert_array_equal(result.sequences[0].tokens.numpy(), alone.sequences[0].tokens.numpy())


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_weights_saved_anew_under_a_name_are_those_that_are_sampled(kind: str, tmp_path: Path, monkeypatch) -> None:
    """Catches keys and values of the weights before: of a name that is not in memory, and of the last one sampled."""
    if kind == "lora":
        monkeypatch.setattr(adapters, "NUM_SOURCES", 1)
    named = ops.CheckpointSampler(CheckpointRef("m", "weights", "w"))

    worker = worker_of(service_config(tmp_path, **(ADAPTERS if kind == "lora" else {})))

    def sample(sampler: ops.CheckpointSampler) -> tuple[list[float], int]:
        result = done(worker, ops.Sample(sampler, tokens(40), max_tokens=4, temperature=0.0, ignore_end=True))
        return result.sequences[0].logprobs.numpy().tolist(), result.num_cached_tokens

    done(worker, ops.CreateModel("m", lora=ops.LoraSpec(seed=1) if kind == "lora" else None), ops.SaveWeights("m", "w"))
    done(worker, *train("m", [datum(30)]))
    before, _ = sample(named)
    assert sample(named) == (before, 32)
    if kind == "lora":
        done(worker, ops.SaveWeightsForSampler("m", "other", sampler_id="other"))
        assert not worker.models.has_source(named.checkpoint.uri("xorl"))
    done(worker, ops.SaveWeights("m", "w", overwrite=True))
    after, num_cached = sample(named)
    assert num_cached == 0
    done(worker, ops.SaveWeightsForSampler("m", "s", sampler_id="s"))
    wanted, _ = sample(saved_by("m", "s"))
    np.testing.assert_allclose(after, wanted, atol=1e-5)
    assert np.abs(np.subtract(after, before)).max() > 1e-3


@pytest.mark.ranks(1)
def test_checkpoints_that_are_sampled_leave_what_a_client_keeps(tmp_path: Path) -> None:
    """Catches a policy that cannot be sampled any more once a teacher and a reference, both saved, were asked."""
    worker = make(tmp_path, "full")
    for name in ("teacher", "reference"):
        done(worker, *train("m", [datum(9)]), ops.SaveWeightsForSampler("m", name))
    done(worker, *train("m", [datum(9)]), ops.SaveWeightsForSampler("m", "policy", sampler_id="policy"))
    saved = [saved_by("m", name) for name in ("teacher", "reference")]
    found = []
    for sampler in [saved_by("m", "policy"), *saved] * 2:
        result = done(worker, ops.Sample(sampler, tokens(5), max_tokens=1, prompt_logprobs=True))
        assert result.prompt_logprobs is not None
        found.append(values(result.prompt_logprobs)[1:].tolist())
    assert found[:3] == found[3:]
    assert len({tuple(one) for one in found}) == 3


@pytest.mark.parametrize(("kind", "num_ranks"), [("full", 1), ("lora", 2)])
def test_samples_are_of_the_weights_that_were_asked_for(kind: str, num_ranks: int, tmp_path: Path, run_ranks) -> None:
    # Catches a snapshot that learns, a base that has learnt, and log-probabilities that training does not have.
    data = [datum(12 + i, i) for i in range(3)]
    prompt = datum(12, 0).tokens

    def sample(worker: Worker, sampler: object) -> tuple[list[int], list[float]]:
        operation = ops.Sample(sampler, prompt, max_tokens=6, seed=3, prompt_logprobs=True, ignore_end=True)  # pyright: ignore
        result = done(worker, operation)
        assert result.prompt_logprobs is not None
        return result.sequences[0].tokens.numpy().tolist(), values(result.prompt_logprobs)[1:].tolist()

    def trained(worker: Worker) -> list[float]:
        result = done(worker, ops.ForwardBackward("m", data[:1], "cross_entropy", forward_only=True))
        return values(result.fields["logprobs"][0])[:-1].tolist() if worker.base.runtime.is_main else []

    def run() -> None:
        worker = make(tmp_path, kind, **shards(num_ranks))
        base = sample(worker, ops.BaseSampler())
        done(
            worker,
            *train("m", data),
            ops.SaveWeightsForSampler("m", "s1", sampler_id="s1"),
            ops.SaveWeightsForSampler("m", "named"),
        )
        learnt = trained(worker)
        first = sample(worker, saved_by("m", "s1"))
        done(worker, *train("m", data), ops.SaveWeightsForSampler("m", "s2", sampler_id="s2"))
        later = trained(worker)
        second = sample(worker, saved_by("m", "s2"))
        assert sample(worker, saved_by("m", "s1")) == first
        assert sample(worker, ops.BaseSampler()) == base
        assert sample(worker, saved_by("m", "named"))[0] == first[0]
        assert trained(worker) == later
        if worker.base.runtime.is_main:
            np.testing.assert_allclose(first[1], learnt, atol=1e-4)
            np.testing.assert_allclose(second[1], later, atol=1e-4)
            assert len({tuple(np.round(x[1], 3)) for x in (base, first, second)}) == 3
        for bad in (saved_by("m", "no"), ops.CheckpointSampler(CheckpointRef("m", "weights", "no"))):
            failure = refusal_of(worker, ops.Sample(bad, prompt, max_tokens=1))
            assert failure.status == 404
        together = ask(
            worker,
            *(
                ops.Sample(ref, prompt, max_tokens=2 + i, seed=i)
                for i, ref in enumerate((ops.BaseSampler(), saved_by("m", "s1"), saved_by("m", "no")))
            ),
        )
        assert [type(result) for result in together] == [ops.SampleResult, ops.SampleResult, ops.Failure]
        done(worker, ops.SaveWeights("m", "w"))
        weights = ops.CheckpointSampler(CheckpointRef("m", "weights", "w"))
        assert sample(worker, weights)[0] == second[0]
        done(
            worker,
            *train("m", data),
            ops.SaveWeightsForSampler("m", "s3", sampler_id="s3"),
            ops.SaveWeights("m", "w", overwrite=True),
        )
        assert sample(worker, weights) == sample(worker, saved_by("m", "s3"))

    run_ranks(run, num_ranks)
