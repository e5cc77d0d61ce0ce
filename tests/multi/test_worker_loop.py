"""The worker's loop over a real channel: all ranks run what rank 0 is asked, once."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from sockets import ipc_address
from worker_ranks import (
    KINDS,
    ask,
    created,
    datum,
    done,
    make,
    refusal_of,
    same,
    saved_by,
    service_config,
    shards,
    train,
    trained_values,
    worker_of,
)
from xorl.ckpt.files import HashedFile
from xorl.config import ServerConfig
from xorl.core import runtime
from xorl.server import messages
from xorl.server import operations as ops
from xorl.server.channel import BlockingServer, ChannelClient
from xorl.server.collectives import GRACE_S
from xorl.server.identifiers import CheckpointRef
from xorl.server.worker import serve
from xorl.server.worker.selftest import self_test
from xorl.server.worker.worker import Worker


def failing_once_done(method: Callable[..., None]) -> Callable[..., None]:
    """Does what it is to do, and fails then."""

    def do_and_fail(*given: object, **named: object) -> None:
        method(*given, **named)
        raise OSError("a broken disk")

    return do_and_fail


@contextmanager
def broken_on_rank_1(owner: object, name: str) -> Iterator[None]:
    """Within it, a method fails on rank 1 once it has done what it is to do."""
    method = getattr(owner, name)
    if runtime.global_rank() == 1:
        setattr(owner, name, failing_once_done(method))
    yield
    setattr(owner, name, method)


def broken_disk() -> str:
    """What this rank says of a disk that is broken on rank 1."""
    return "OSError: a broken disk" if runtime.global_rank() == 1 else "rank 1: a broken disk"


def worked(config: ServerConfig, ask_all: Callable[[str], Coroutine[Any, Any, None]]) -> Worker:
    """This rank's worker when it has done what is asked of rank 0's address; collective."""
    with ipc_address("workers") as address:
        server, cancelled = None, serve.CancelledIds()
        if runtime.global_rank() == 0:
            server = BlockingServer(address, messages.Work | messages.Cancel, intercept=cancelled.intercept)
            asking = threading.Thread(target=lambda: asyncio.run(ask_all(server.address)))
            asking.start()
        worker = worker_of(config)
        self_test(worker)
        assert not worker.models.names
        if server is None:
            serve.follow(worker)
        else:
            serve.lead(worker, server, cancelled)
            asking.join()
            server.close()
        return worker


@asynccontextmanager
async def client_of(address: str) -> AsyncIterator[Callable[..., Awaitable[list[messages.Result]]]]:
    """(ids, *operations) -> their results, from rank 0."""
    client: ChannelClient[messages.Done] = ChannelClient(address, messages.Done)
    await client.start()

    async def results(ids: str, *operations: messages.Operation) -> list[messages.Result]:
        work = messages.Work(ids.split(), list(operations))
        answer = await client.request(work, timeout_s=60)
        assert answer.ids == work.ids
        return answer.results

    yield results
    await client.close()


def test_work_is_done_once_by_all_ranks_and_answered_again(tmp_path: Path, run_ranks, monkeypatch) -> None:
    # Catches ranks that part, a result that is lost with its orchestrator, a step that is taken twice because it was
    # asked for again, and ranks that give up on a rank 0 which has nothing to do.
    monkeypatch.setattr(serve, "IDLE_S", 0.05)
    data = [datum(4 + i, i) for i in range(5)]
    calls = [ops.ForwardBackward("m", own, "cross_entropy") for own in (data, [])]
    step = ops.OptimStep("m", 1e-2)

    def run() -> list[messages.Result]:
        answers: list[messages.Result] = []

        async def ask_all(address: str) -> None:
            async with client_of(address) as results:
                for ids, *operations in (
                    ("0", messages.Health()),
                    ("1", ops.CreateModel("m")),
                    ("2 2b", *calls),
                    ("3", step),
                    ("3", step),
                    ("4", step),
                    ("5", ops.SaveWeights("m", "../a")),
                    ("6", messages.Shutdown()),
                ):
                    answers.extend(await results(ids, *operations))

        worked(service_config(tmp_path, data_parallel_shard_size=2), ask_all)
        return answers

    answers, _ = run_ranks(run, 2)
    health, _, loss, empty, first, again, second, refused, last = answers
    assert health.world_size == 2
    assert len(loss.fields["logprobs"]) == len(data)
    assert isinstance(empty, ops.Failure)
    assert isinstance(first, ops.OptimResult)
    assert first == again
    assert (first.metrics["step"], second.metrics["step"], second.metrics["no_gradient"]) == (1, 1, 1)
    assert "1 to 128 of the characters" in refused.message
    assert isinstance(last, messages.ShutdownResult)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_save_in_the_background_lets_other_calls_run(kind: str, tmp_path: Path, run_ranks, monkeypatch) -> None:
    # Catches workers that all clients wait for while one saves, a save that is acknowledged before it is complete, and
    # one whose model has changed before it was copied.
    may_write, close = threading.Event(), HashedFile.close

    def close_when_told(file: HashedFile) -> None:
        may_write.wait(60 if runtime.global_rank() == 0 else 0)
        close(file)

    def run() -> tuple[list[messages.Result | bool], dict[str, Tensor]]:
        answers: list[messages.Result | bool] = []

        async def ask_while_saving(address: str) -> None:
            async with client_of(address) as results:
                await results("1", created("m", kind))
                saving = asyncio.create_task(results("2", ops.SaveWeights("m", "a")))
                await asyncio.sleep(0)
                answers.extend(await results("3", messages.Health()))
                await results("4", ops.ForwardBackward("m", [datum(4, 1)], "cross_entropy"))
                await results("5", ops.OptimStep("m", 1e-1))
                answers.append(saving.done())
                may_write.set()
                answers.extend(await saving)
                for name in ("2", "6"):
                    answers.extend(await results(name, ops.SaveWeights("m", "a")))
                await results("7", ops.LoadWeights("m", CheckpointRef("m", "weights", "a"), optimizer=True))
                answers.extend(await results("8", messages.Shutdown()))

        worker = worked(service_config(tmp_path, **KINDS[kind], save_async=True, **shards(2)), ask_while_saving)
        return answers, trained_values(worker, "m")

    def fresh() -> dict[str, Tensor]:
        return trained_values(make(tmp_path, kind, **shards(2)), "m")

    with monkeypatch.context() as patch:
        patch.setattr(HashedFile, "close", close_when_told)
        (answers, loaded), _ = run_ranks(run, 2)
    health, was_saved, saved, again, taken, _ = answers
    assert isinstance(health, messages.HealthResult)
    assert not was_saved
    assert saved.size_bytes > 0
    assert again == saved
    assert taken.status == 409
    assert same(loaded, run_ranks(fresh, 2)[0])


def test_results_are_kept_within_bounds() -> None:
    # Catches memory that grows with every operation, and failures that are answered instead of tried again.
    results = serve.ResultCache(max_results=2)
    for number in range(3):
        results.add(str(number), ops.OptimResult({"step": float(number)}))
    results.add("failed", ops.Failure("server", 500, ""))
    assert [results.get(name) is not None for name in ("0", "1", "2", "failed")] == [False, True, True, False]
    small, ref = serve.ResultCache(max_bytes=10), CheckpointRef("m", "sampler_weights", "s")
    small.add("a", ops.Saved(ref, "x" * 100))
    assert small.get("a") is not None
    small.add("b", ops.Saved(ref, "y" * 100))
    assert [small.get(name) is not None for name in "ab"] == [False, True]


@pytest.mark.parametrize("asked", ["a pass", "a sample"])
def test_a_rank_that_dies_ends_the_others_and_its_call_has_no_answer(asked: str, tmp_path: Path, run_ranks) -> None:
    """Catches a client that is told of a broken connection, as its call's final result, where one GPU's process died.

    Without an answer the orchestrator has the workers that are started next compute the call. A rank dies in a pass, or
    while a checkpoint is read to sample from.
    """

    def run() -> list[messages.Result]:
        worker = make(tmp_path, "full", **shards(2))
        done(worker, ops.SaveWeightsForSampler("m", "s"))
        if runtime.global_rank() == 1:
            worker.base.module.layers[1].register_forward_hook(lambda *_: os._exit(9))
            worker.saved.describe = lambda _: os._exit(9)
        call = ops.ForwardBackward("m", [datum(4, 1), datum(5, 2)], "cross_entropy")
        sample = ops.Sample(saved_by("m", "s"), datum(4, 1).tokens, max_tokens=1)
        return ask(worker, call if asked == "a pass" else sample)

    assert run_ranks(run, 2) == ["no result", "no result"]


@pytest.mark.ranks(2)
def test_a_checkpoint_that_one_rank_cannot_read_is_held_by_none(tmp_path: Path) -> None:
    # Catches ranks that part: one holds what another one has not, so only one of them reads it when it is asked for.
    worker = make(tmp_path, "full", **shards(2))
    done(worker, ops.SaveWeightsForSampler("m", "s"))
    sample = ops.Sample(saved_by("m", "s"), datum(4, 1).tokens, max_tokens=1)
    with broken_on_rank_1(worker.saved, "load_source"):
        assert broken_disk() in refusal_of(worker, sample).message
    done(worker, sample)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fails", ["create", "load"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_model_that_one_rank_cannot_make_is_on_none(kind: str, fails: str, tmp_path: Path) -> None:
    # Catches a name that is taken until the workers start anew, by a model that no client was given.
    worker = make(tmp_path, kind, **shards(2))
    done(worker, ops.SaveWeights("m", "a"), ops.UnloadModel("m"))
    again = ops.CreateModel("n", checkpoint=CheckpointRef("m", "weights", "a"))
    with broken_on_rank_1(worker.models if fails == "create" else worker.saved, fails):
        assert broken_disk() in refusal_of(worker, again).message
    done(worker, again)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", ["before_loading", "after_loading"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_load_that_fails_on_one_rank_leaves_all_the_model_or_none(kind: str, change: str, tmp_path: Path) -> None:
    # Catches training with the checkpoint's weights on one rank and others on the next, and a base that is half loaded.
    load = ops.LoadWeights("m", CheckpointRef("m", "weights", "a"), optimizer=True)
    data = [datum(4, 1), datum(5, 2)]
    worker = make(tmp_path, kind, **shards(2))
    first = trained_values(worker, "m")
    done(worker, *train("m", data), ops.SaveWeights("m", "a"), *train("m", data))
    before = trained_values(worker, "m")
    for owner, method in ((worker.saved, "describe"), (worker.models, change)):
        with broken_on_rank_1(owner, method):
            failure = refusal_of(worker, load)
        assert broken_disk() in failure.message
        assert failure.model_given_up == (method == change)
        if method == "describe":
            assert same(before, trained_values(worker, "m"))
    assert_gone(worker, train("m", data)[0])
    done(worker, created("m", kind))
    assert same(first, trained_values(worker, "m"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_step_that_fails_on_one_rank_leaves_the_model_on_none(kind: str, tmp_path: Path) -> None:
    # Catches a client that is told that nothing was changed, by ranks of which some have taken the step.
    worker = make(tmp_path, kind, **shards(2))
    call, step = train("m", [datum(4, 1), datum(5, 2)])
    done(worker, call)
    assert not refusal_of(worker, ops.OptimStep("m", 1e-2, grad_clip_norm=-1.0)).model_given_up
    with broken_on_rank_1(worker.models, "step"):
        failed = refusal_of(worker, step)
    assert f"{broken_disk()}; model m is rebuilt" in failed.message
    assert failed.model_given_up
    assert_gone(worker, call)


def assert_gone(worker: Worker, call: messages.Operation) -> None:
    """Whoever lost the connection before it was told of the failure learns it, too."""
    gone = refusal_of(worker, call)
    assert ("there is no model 'm'" in gone.message, gone.model_given_up) == (True, True)


@pytest.mark.parametrize(("kind", "fails"), [("full", "_compute"), ("lora", "_advance"), ("full", "submit")])
def test_samples_that_one_rank_cannot_draw_fail_on_all_at_once(
    kind: str, fails: str, tmp_path: Path, run_ranks
) -> None:
    # Catches ranks that wait for one that failed alone, a client that is not told why, and samples with their tokens.
    samples = [ops.Sample(ops.BaseSampler(), datum(4, seed).tokens, max_tokens=5, ignore_end=True) for seed in (1, 2)]

    def run() -> tuple[list[messages.Result], float]:
        worker = make(tmp_path, kind, **shards(2))
        wanted = ask(worker, *samples)
        sampler = worker.sampling._sampler
        method = getattr(sampler, fails)
        read = worker._read_sample

        def read_and_break(operation: ops.Sample, operation_id: str) -> object:
            # What is asked of the sampler from here on is what the request is computed with.
            found = read(operation, operation_id)
            setattr(sampler, fails, failing_once_done(method))
            return found

        if runtime.global_rank() == 1:
            worker._read_sample = read_and_break  # pyright: ignore[reportAttributeAccessIssue]
        start = time.monotonic()
        failed = ask(worker, samples[1])
        seconds = time.monotonic() - start
        worker._read_sample = read
        setattr(sampler, fails, method)
        assert ask(worker, *samples) == wanted
        return [*wanted, *failed], seconds

    for results, seconds in run_ranks(run, 2):
        *wanted, failed = results
        assert all(isinstance(result, ops.SampleResult) for result in wanted)
        assert (failed.status, "a broken disk" in failed.message) == (500, True)
        assert seconds < GRACE_S / 10


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", list(KINDS))
def test_weights_that_one_rank_cannot_keep_are_kept_by_none(kind: str, tmp_path: Path) -> None:
    # Catches ranks that part: what one of them then forgets as its oldest weights, another one still samples from.
    first, second = (ops.SaveWeightsForSampler("m", name, sampler_id="s") for name in ("first", "second"))
    worker = make(tmp_path, kind, **shards(2))
    with broken_on_rank_1(worker.models, "snapshot"):
        ask(worker, first)
    done(worker, second)
    kept = [worker.models.has_source(f"xorl://m/sampler_weights/{name}") for name in ("first", "second")]
    assert kept == [False, True]
